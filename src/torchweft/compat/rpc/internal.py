"""Pickles calls, for programs that use PyTorch's RPC pickler or a pickler of their own.

Weft's own calls take a shorter path; reducers that a program registers here apply to them too. With
a program's own pickler, its bytes and tensors travel as the arguments of ``run_pickled``, which
unpickles and runs the call on the other side. Results travel as usual, as they do in PyTorch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ProtocolError, SerializationError
from torchweft.rpc.functions import async_execution, is_async_execution
from torchweft.rpc.torch_names import RPCExecMode, pack, register_reducer, unpack
from torchweft.rpc.torch_names import build_key as _build_rpc_profiling_key

__all__ = [
    "PythonUDF",
    "RPCExecMode",
    "_build_rpc_profiling_key",
    "deserialize",
    "serialize",
]


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class _InternalRPCPickler:
    """Turns objects into bytes and a table of the tensors in them, and back.

    Programs derive their own picklers from it, for ``rpc.api._use_rpc_pickler``.
    """

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}
        self._dispatch_table: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Registers a reducer for objects of exactly that class; the first reducer stays."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Returns an object as bytes, and the tensors that were in it.

        Raises:
            SerializationError: Some part cannot be sent; the message says which.
        """
        own = {**self._dispatch_table, **self._class_reducer_dict}
        packed = pack(obj, main_by_name=True, reducers=own or None)
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
    """The default pickler; its reducers apply to all calls."""

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
    """Puts references of objects pickled in this block into a list; unpickling takes them from it.

    The list travels in the call, whose protocol counts each reference's users; references within
    the bytes would not be counted.
    """
    before, _beside.references = _beside.references, references
    try:
        yield
    finally:
        _beside.references = before


def _take_reference(reference: Any) -> Any:
    """Returns the placeholder of a reference in the bytes."""
    if _beside.references is None:
        return reference._serialize()
    _beside.references.append(reference)
    return len(_beside.references) - 1


def _give_reference(data: Any) -> Any:
    if _beside.references is None:
        raise SerializationError("an RRef can only be received in a call or its result")
    return _beside.references[data]


# Calls that a program's own pickler has pickled


def pickled_call(
    pickler: Any, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
    """Returns a function and arguments that replace those of a call.

    Args:
        pickler: Has a ``serialize`` whose bytes ``internal.deserialize`` can read.
        function: The function to run on the other worker.
        args: Its positional arguments, or None.
        kwargs: Its keyword arguments, or None.
    """
    references: list[Any] = []
    with references_beside(references):
        binary, tensors = pickler.serialize(PythonUDF(function, tuple(args or ()), kwargs or {}))
    run = run_pickled_later if is_async_execution(function) else run_pickled
    return run, (binary, list(tensors), references), None


def run_pickled(binary: bytes, tensors: Sequence[Tensor], references: list[Any]) -> Any:
    """Runs the call that ``pickled_call`` wrapped; returns its result, or its coroutine.

    It is not among the functions that a worker with restrictions runs for others: pickles of a
    program's own pickler cannot be checked.
    """
    with references_beside(references):
        call = deserialize(binary, tensors)
    return call.func(*call.args, **call.kwargs)


@async_execution
def run_pickled_later(
    binary: bytes, tensors: Sequence[Tensor], references: list[Any]
) -> torch.futures.Future[Any]:
    """Does the same for a function that returns a future of its result."""
    return run_pickled(binary, tensors, references)  # type: ignore[no-any-return]
