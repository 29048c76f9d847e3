"""Reads messages: anything, names that an allow-list admits, or plain values only.

All incoming data passes one of the functions of a ``Reader``, which is chosen once, when the worker
starts. So a worker without restrictions pays nothing for them.

C code reads pickles for a worker that trusts its group. With an allow-list it cannot: a pickle can
also change objects that it names (``BUILD`` on a class sets its attributes), and only the Python
unpickler allows refusing that. It costs some microseconds for a usual message.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.errors import NotAllowed, SerializationError, WeftError
from torchweft.serialize import arrays, functions, objects, plain
from torchweft.serialize.allowed import AllowList
from torchweft.serialize.callables import StrictNames
from torchweft.serialize.exceptions import unpack_error


class Reader(NamedTuple):
    """The functions by which one worker turns messages into objects.

    Attributes:
        is_restricted: Whether it refuses anything.
        is_strict: Whether it refuses all pickles.
        resolve: Returns the function with a name.
        method_of: Returns the method of a value of this worker that another worker asks for.
        check_called: Raises if a function that a message contains may not be called.
        unpack: Does the same as ``objects.unpack``.
        unpack_error: Does the same as ``exceptions.unpack_error``.
    """

    is_restricted: bool
    is_strict: bool
    resolve: Callable[[bytes], Any]
    method_of: Callable[[Any, str], Any]
    check_called: Callable[[Any], None]
    unpack: Callable[[Any, Sequence[Tensor], Sequence[object]], Any]
    unpack_error: Callable[[Any], BaseException]


def _may_be_called(function: Any) -> None:
    """Permits calls of every function that was read."""


TRUSTING = Reader(
    False, False, functions.resolve, getattr, _may_be_called, objects.unpack, unpack_error
)
"""Reads everything that the workers of its group send."""


def make_reader(
    allowed: Iterable[str] | None, is_strict: bool, worker: str, callables: Iterable[Any] = ()
) -> Reader:
    """Returns the reader for the options of a worker.

    Args:
        allowed: Modules whose functions and classes may be used; None for all. Not for a strict
            worker.
        is_strict: Whether pickles are refused, and functions that are not registered.
        worker: Name of the worker, for error messages.
        callables: Functions and classes that a strict worker registers beside the program's.

    Raises:
        ArgumentTypeError: One of ``callables`` cannot be called by others.
    """
    if is_strict:
        strict = StrictNames(callables, worker)
        restricted: _Restricted = _Strict(strict, worker)
        calls = (strict.resolve, strict.method_of, strict.check_called)
    elif allowed is None:
        return TRUSTING
    else:
        names = AllowList(allowed, worker)
        restricted = _Allowing(names)
        calls = (names.resolve, names.method_of, _may_be_called)
    return Reader(True, is_strict, *calls, restricted.unpack, restricted.unpack_error)


class _Restricted:
    """Base class of the readers with restrictions."""

    def __init__(
        self, resolve: Callable[[bytes], Any], find_type: Callable[[str, str], Any]
    ) -> None:
        self._resolve = resolve
        self._find_type = find_type

    def unpack(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
    ) -> Any:
        """Returns the object in a message, or raises NotAllowed."""
        if not payload:
            return tensors[0] if tensors else None
        if payload[0] == plain.MARK:
            return plain.decode(payload, tensors, externals, self._resolve)
        return self._unpickle(payload, tensors, externals)

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        raise NotImplementedError

    def unpack_error(self, content: bytes | bytearray | memoryview) -> BaseException:
        """Returns the error in a message, of the nearest type that is allowed."""
        return unpack_error(content, find=self._find_type, unpack=self.unpack)


class _Allowing(_Restricted):
    """Reads pickles that name only objects that an allow-list admits."""

    def __init__(self, allowed: AllowList) -> None:
        super().__init__(allowed.resolve, allowed.find_global)
        self._allowed = allowed

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        unpickler = AllowingUnpickler(payload, tensors, externals, self._allowed)
        try:
            return unpickler.load()
        except WeftError:
            raise
        except Exception as error:
            raise SerializationError(
                f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
            ) from error


class _Strict(_Restricted):
    """Refuses all pickles."""

    def __init__(self, names: StrictNames, worker: str) -> None:
        super().__init__(names.resolve_value, names.find_type)
        self._worker = worker

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        raise NotAllowed(
            f"worker {self._worker!r} is strict and was sent a pickle, which it does not read; "
            f"send it {plain.TAKES}",
            worker=self._worker,
            refused="a pickle",
        )

    def unpack_error(self, content: bytes | bytearray | memoryview) -> BaseException:
        """Returns the error in a message, of the nearest type that is known; never unpickles."""
        if len(content) and content[0] == plain.MARK:
            return super().unpack_error(content)
        try:
            self._unpickle(content, (), ())
        except NotAllowed as error:
            return error
        raise AssertionError("a pickle was not refused")


class AllowingUnpickler(pickle._Unpickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Reads a pickle that names only objects that an allow-list admits, and changes none of them.

    Args:
        payload: The pickle, made by ``objects.pack``.
        tensors: The tensors taken out of it.
        externals: The other objects taken out of it.
        allowed: The list.
    """

    def __init__(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        allowed: AllowList,
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._taken_out = {
            objects.TENSOR_MARKER: tensors.__getitem__,
            objects.EXTERNAL_MARKER: externals.__getitem__,
            (functions.__name__, functions.resolve.__name__): self._find_named,
        }
        self._find = allowed.find_global
        self._named: dict[int, object] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns the object that a global names here, or raises NotAllowed."""
        found = self._taken_out.get((module_name, global_name))
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
    arrays.check_state(unpickler.stack[-2], unpickler.stack[-1])
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
