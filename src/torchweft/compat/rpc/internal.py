"""Pickling and running of calls, for programs that look into it.

Weft's own calls go another, shorter way; what a program registers here reaches them too.
"""

from __future__ import annotations

import enum
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.errors import ConfigurationError, ProtocolError, RemoteError
from torchweft.serialize.objects import pack, pack_with, unpack
from torchweft.serialize.reducers import register_reducer

__all__ = [
    "PythonUDF",
    "RPCExecMode",
    "RemoteException",
    "deserialize",
    "serialize",
]


class RPCExecMode(enum.Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function, and what it is to be called with."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """What takes the place of a result where the function raised."""

    msg: str
    exception_type: Any


class _InternalRPCPickler:
    """Turns objects into bytes and a table of the tensors in them, and back.

    Programs derive their own from it, for ``rpc.api._use_rpc_pickler``.
    """

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}
        self._dispatch_table: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Has objects of exactly that class reduced by a function; the first one stays."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Returns an object as bytes, and the tensors that were in it.

        Raises:
            SerializationError: Some part cannot be sent; says which.
        """
        own = {**self._dispatch_table, **self._class_reducer_dict}
        packed = pack_with(obj, own) if own else pack(obj, main_by_name=True)
        references = [_take_reference(reference) for reference in packed.externals]
        return pickle.dumps((packed.payload, references), 5), packed.tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """Returns the object that ``serialize`` was given.

        Raises:
            UnknownFunction: A function or class in it cannot be imported here.
        """
        try:
            payload, references = pickle.loads(binary_data)
        except Exception as error:
            raise ProtocolError(f"these are no bytes of Weft's RPC pickler: {error}") from error
        return unpack(payload, tensor_table, [_give_reference(data) for data in references])


class _WeftPickler(_InternalRPCPickler):
    """The pickler that is in use by default: what it knows, all calls know."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        if obj_class not in self._class_reducer_dict:
            super()._register_reducer(obj_class, reducer)
            register_reducer(obj_class, reducer)


_internal_rpc_pickler = _WeftPickler()


def serialize(obj: Any) -> tuple[bytes, list[Tensor]]:
    """Returns an object as bytes, and the tensors that were in it."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
    """Returns the object that ``serialize`` was given."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


class _Beside(threading.local):
    """The references of the call that this thread is pickling or unpickling."""

    references: list[Any] | None = None


_beside = _Beside()


@contextmanager
def references_beside(references: list[Any]) -> Iterator[None]:
    """Has what is pickled in this block leave its references in a list, or take them from it.

    The list travels in the call, whose protocol counts who has a reference; bytes are not counted.
    """
    before, _beside.references = _beside.references, references
    try:
        yield
    finally:
        _beside.references = before


def _take_reference(reference: Any) -> Any:
    """Returns what stands for a reference in the bytes."""
    if _beside.references is None:
        return reference._serialize()
    _beside.references.append(reference)
    return len(_beside.references) - 1


def _give_reference(data: Any) -> Any:
    from torchweft.compat.rpc.references import PyRRef  # Needs what is above.

    if _beside.references is None:
        return PyRRef._deserialize(data)
    return _beside.references[data]


def _run_function(python_udf: Any) -> Any:
    """Runs a ``PythonUDF`` and returns its result, or a ``RemoteException`` if it raises."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))
    except Exception as error:
        text = f"On {torchweft.rpc.get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raises what a ``RemoteException`` stands for; does nothing with any other result."""
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except BaseException as failure:
        name = getattr(result.exception_type, "__qualname__", str(result.exception_type))
        raise RemoteError(
            f"Failed to create original exception type {name}: {failure}. Original exception on "
            f"remote side was {result.msg}",
            type_name=name,
        ) from failure
    raise error


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name under which a call would appear in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> record_function:
    """Begins the profiler's event of a call, which the caller of this has to end.

    Raises:
        ConfigurationError: No profiler of PyTorch runs in this thread.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise ConfigurationError("no profiler runs in this thread; begin one before")
    event = record_function(
        _build_rpc_profiling_key(exec_type, func_name, current_worker_name, dest_worker_name)
    )
    event.__enter__()  # type: ignore[no-untyped-call]
    return event
