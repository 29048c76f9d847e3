"""Reads pickles that name only what an allow-list admits, and change nothing that they name.

C code cannot read them: a pickle can also change objects that it names (``BUILD`` on a class sets
its attributes), and only the Python unpickler allows refusing that. It costs some microseconds for
a usual message.

numpy trusts a pickle with its memory. An array of objects that is made of bytes takes them for
addresses. The state of a dtype can say that it has no objects, although it has. Setting the state
of an array that already has memory frees that memory under its views. So no pickle may set a state
of numpy's: Weft's own reducers take arrays, scalars and dtypes apart.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from torchweft.engine.codec import functions
from torchweft.engine.codec.objects import taken_out


class AllowingUnpickler(pickle._Unpickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Reads a pickle that names only objects that an allow-list admits, and changes none of them.

    Args:
        payload: The pickle, made by ``objects.pack``.
        tensors: The tensors taken out of it.
        externals: The other objects taken out of it.
        find: Returns the object that a global names here, or raises NotAllowed.
    """

    def __init__(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        find: Callable[[str, str], Any],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._taken_out = {
            **taken_out(tensors, externals),
            (functions.__name__, functions.resolve.__name__): self._find_named,
        }
        self._find = find
        self._named: dict[int, object] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns the object that a global names here, or raises NotAllowed."""
        name = (module_name, global_name)
        found = self._taken_out.get(name)
        if found is None:
            found = self._find(module_name, global_name)
        self._named[id(found)] = found
        return found

    def _find_named(self, name: bytes) -> Any:
        return self.find_class(*name.decode().split(":", 1))

    def get_extension(self, code: int) -> None:
        """Refuses a number that stands for a global."""
        raise pickle.UnpicklingError(f"a pickle has the extension code {code}")

    def check_changed(self, target: object) -> None:
        """Raises UnpicklingError if a pickle would change an object that it only names."""
        kinds = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
        if isinstance(target, (np.ndarray, np.dtype, np.generic)):
            raise pickle.UnpicklingError(
                "a pickle would set a state of numpy's, as of an array with fields; send a dict "
                "of arrays instead"
            )
        if id(target) in self._named or isinstance(target, kinds):
            raise pickle.UnpicklingError(f"a pickle would change {target!r}, which it only names")


def _guarded(read: Callable[[Any], None], target: Callable[[Any], object]) -> Callable[..., None]:
    def read_guarded(unpickler: Any) -> None:
        unpickler.check_changed(target(unpickler))
        read(unpickler)

    return read_guarded


def _read_bytearray(unpickler: Any) -> None:
    """Reads a bytearray; takes memory for the bytes present, not for the announced size."""
    size_bytes = int.from_bytes(unpickler.read(8), "little")
    content = unpickler.read(size_bytes)
    if len(content) < size_bytes:
        raise pickle.UnpicklingError("a bytearray in a pickle is cut short")
    unpickler.append(bytearray(content))


def _below_mark(unpickler: Any) -> object:
    return unpickler.metastack[-1][-1]


_TARGETS: dict[bytes, Callable[[Any], object]] = {
    pickle.BUILD: lambda unpickler: unpickler.stack[-2],
    pickle.APPEND: lambda unpickler: unpickler.stack[-2],
    pickle.SETITEM: lambda unpickler: unpickler.stack[-3],
    pickle.APPENDS: _below_mark,
    pickle.SETITEMS: _below_mark,
    pickle.ADDITEMS: _below_mark,
}
"""The instructions that change an object, and where they find it."""

AllowingUnpickler.dispatch = {
    **AllowingUnpickler.dispatch,
    pickle.BYTEARRAY8[0]: _read_bytearray,
    **{
        code[0]: _guarded(AllowingUnpickler.dispatch[code[0]], target)
        for code, target in _TARGETS.items()
    },
}
