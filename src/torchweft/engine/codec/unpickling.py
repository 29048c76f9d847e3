"""Reads pickles that name only what an allow-list admits, and change nothing that they name.

C code cannot read them: a pickle can also change objects that it names (``BUILD`` on a class sets
its attributes), and only the Python unpickler allows refusing that. It costs some microseconds for
a usual message.

numpy trusts a pickle with its memory. An array of objects that is made of bytes takes them for
addresses. The state of a dtype can say that it has no objects, although it has. Setting the state
of an array that already has memory frees that memory under its views. So the functions that numpy
calls when a pickle is read are replaced.
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
from torchweft.errors import SerializationError


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
        found = self._taken_out.get(name) or _STAND_INS.get(name)
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
        if id(target) in self._named or isinstance(target, kinds):
            raise pickle.UnpicklingError(f"a pickle would change {target!r}, which it only names")


def _guarded(read: Callable[[Any], None], target: Callable[[Any], object]) -> Callable[..., None]:
    def read_guarded(unpickler: Any) -> None:
        unpickler.check_changed(target(unpickler))
        read(unpickler)

    return read_guarded


def _build(unpickler: Any) -> None:
    _check_array(unpickler.stack[-2], unpickler.stack[-1])
    pickle._Unpickler.load_build(unpickler)  # type: ignore[attr-defined, unused-ignore]


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
        code[0]: _guarded({**AllowingUnpickler.dispatch, pickle.BUILD[0]: _build}[code[0]], target)
        for code, target in _TARGETS.items()
    },
}


# Arrays of numpy

_FLAGS = 7
_ITEM_BYTES = 5
_SUBARRAY, _NAMES, _FIELDS = 2, 3, 4
_DTYPE_PARTS = range(8, 10)
_KEPT_SIZE = (-1, 0)


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Makes the empty array whose state comes next."""
    if kind is not _ARRAY:
        raise SerializationError("a message has an array of a class that is not numpy's")
    return np.empty(0, dtype=np.int8)


def _dtype(name: Any, *rest: Any) -> np.dtype[Any]:
    """Makes a dtype that is not shared, because its state comes next."""
    if not isinstance(name, str):
        raise SerializationError(f"a message has a dtype named by a {type(name).__name__}")
    return np.dtype(name, align=False, copy=True)


def _scalar(kind: Any, content: Any = b"") -> Any:
    _check_bytes(kind, content)
    return np.frombuffer(content, kind, 1)[0]


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    _check_bytes(kind, content)
    made = np.frombuffer(content, kind)
    if order == "K":
        return made.reshape(shape).transpose(axes)
    return made.reshape(shape, order=order)


def _check_bytes(kind: Any, content: Any) -> None:
    is_sound = isinstance(kind, np.dtype) and isinstance(content, (bytes, bytearray))
    if not is_sound or kind.hasobject or not kind.itemsize:
        raise SerializationError("a message makes values of numpy out of something else")


def _check_array(target: object, state: Any) -> None:
    """Raises SerializationError if a pickle sets a state that numpy cannot have made.

    Args:
        target: An array or a dtype; any other object is not checked.
        state: The state that the pickle sets.
    """
    if isinstance(target, np.dtype):
        parts = state if isinstance(state, tuple) else ()
        if len(parts) not in _DTYPE_PARTS or not _is_own_state(target, parts):
            raise SerializationError(
                f"a message has a dtype like {target} with fields, or with a state that is not "
                "its own; send a dict of arrays instead"
            )
    elif isinstance(target, (np.ndarray, np.generic)):
        parts = state if isinstance(state, tuple) else ()
        content = parts[4] if len(parts) == 5 else None
        kind = parts[2] if len(parts) == 5 else None
        is_of_objects = isinstance(kind, np.dtype) and kind.hasobject
        expected = list if is_of_objects else (bytes, bytearray)
        if target.size or not isinstance(kind, np.dtype) or not isinstance(content, expected):
            raise SerializationError("a message sets an array of numpy to what it cannot be")


def _is_own_state(target: np.dtype[Any], parts: tuple[Any, ...]) -> bool:
    if any(parts[place] is not None for place in (_SUBARRAY, _NAMES, _FIELDS)):
        return False
    return parts[_FLAGS] == target.flags and parts[_ITEM_BYTES] in (*_KEPT_SIZE, target.itemsize)


class _Array:
    """Stands for the class of arrays, which may not be called."""


_ARRAY = _Array()

_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _dtype,
}
"""Replacements of numpy's own functions in a pickle, by module and name."""
for _package in ("numpy.core", "numpy._core"):
    _STAND_INS[f"{_package}.multiarray", "_reconstruct"] = _reconstruct
    _STAND_INS[f"{_package}.multiarray", "scalar"] = _scalar
    _STAND_INS[f"{_package}.numeric", "_frombuffer"] = _frombuffer
