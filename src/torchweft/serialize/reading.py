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
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch import Tensor

from torchweft.errors import NotAllowed, SerializationError, WeftError
from torchweft.ids import ReferenceId
from torchweft.serialize import by_value, functions, objects, value_reading, values
from torchweft.serialize.allowed import AllowList
from torchweft.serialize.by_value import Code
from torchweft.serialize.exceptions import unpack_error
from torchweft.serialize.registry import StrictNames
from torchweft.serialize.value_reading import limit_of_repetition
from torchweft.threads.interrupts import is_of_handler


class Reader(NamedTuple):
    """The functions by which one worker turns messages into objects.

    Attributes:
        is_restricted: Whether it refuses anything.
        is_strict: Whether it refuses all pickles.
        resolve: Returns the function with a name that is called.
        resolve_value: Returns the function or class with a name that is a value.
        method_of: Returns the method of a value of this worker that another worker asks for.
        check_called: Raises if a function that a message contains may not be called.
        bind: Does the same as ``by_value.bind``.
        unpack: Does the same as ``objects.unpack``.
        unpack_error: Does the same as ``exceptions.unpack_error``.
    """

    is_restricted: bool
    is_strict: bool
    resolve: Callable[[bytes], Any]
    resolve_value: Callable[[bytes], Any]
    method_of: Callable[[Any, str], Any]
    check_called: Callable[[Any], None]
    bind: Callable[[Code, Any], tuple[Any, tuple[Any, ...]]]
    unpack: Callable[..., Any]
    unpack_error: Callable[[Any], BaseException]


def _may_be_called(function: Any) -> None:
    """Permits calls of every function that was read."""


TRUSTING = Reader(
    False,
    False,
    functions.resolve,
    functions.resolve,
    getattr,
    _may_be_called,
    by_value.bind,
    objects.unpack,
    unpack_error,
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
        calls = (strict.resolve, strict.resolve_value, strict.method_of, strict.check_called)
    elif allowed is None:
        return TRUSTING
    else:
        names = AllowList(allowed, worker)
        restricted = _Allowing(names)
        calls = (names.resolve, names.resolve, names.method_of, _may_be_called)
    reads = (restricted.bind, restricted.unpack, restricted.unpack_error)
    return Reader(True, is_strict, *calls, *reads)


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
        come_home: Callable[[ReferenceId], Any] = value_reading.refuse_home,
    ) -> Any:
        """Returns the object in a message, or raises NotAllowed."""
        if not payload:
            return tensors[0] if tensors else None
        if payload[0] != values.PICKLE:
            limit_bytes = limit_of_repetition(len(payload), tensors)
            return value_reading.decode(
                payload, tensors, externals, self._resolve, come_home, limit_bytes
            )
        return self._unpickle(payload, tensors, externals)

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        raise NotImplementedError

    def bind(self, code: Code, captured: Any) -> NoReturn:
        """Raises NotAllowed: a function would have to be made of code from another worker."""
        raise NotImplementedError

    def unpack_error(self, content: bytes | bytearray | memoryview) -> BaseException:
        """Returns the error in a message, of the nearest type that is allowed."""
        return unpack_error(content, find=self._find_type, unpack=self.unpack)


class _Allowing(_Restricted):
    """Reads pickles that name only objects that an allow-list admits."""

    def __init__(self, allowed: AllowList) -> None:
        super().__init__(allowed.resolve, allowed.find_global)
        self._allowed = allowed

    def bind(self, code: Code, captured: Any) -> NoReturn:
        self._allowed.refuse_by_value()

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> Any:
        unpickler = AllowingUnpickler(payload, tensors, externals, self._allowed)
        try:
            return unpickler.load()
        except WeftError:
            raise
        except Exception as error:
            if is_of_handler(error):
                raise
            raise SerializationError(
                f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
            ) from error


class _Strict(_Restricted):
    """Refuses all pickles."""

    def __init__(self, names: StrictNames, worker: str) -> None:
        super().__init__(names.resolve_value, names.find_type)
        self._worker = worker

    def bind(self, code: Code, captured: Any) -> NoReturn:
        self._unpickle(b"", (), ())

    def _unpickle(self, payload: Any, tensors: Any, externals: Any) -> NoReturn:
        raise NotAllowed(
            f"worker {self._worker!r} is strict and was sent a pickle, which it does not read; "
            f"send it {values.TAKES}",
            worker=self._worker,
            refused="a pickle",
        )

    def unpack_error(self, content: bytes | bytearray | memoryview) -> BaseException:
        """Returns the error in a message, of the nearest type that is known; never unpickles."""
        if len(content) and content[0] != values.PICKLE:
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


# Arrays of numpy, which trusts a pickle with its memory. An array of objects that is made of bytes
# takes them for addresses. The state of a dtype can say that it has no objects, although it has.
# Setting the state of an array that already has memory frees that memory under its views. So the
# functions that numpy calls when a pickle is read are replaced.

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
