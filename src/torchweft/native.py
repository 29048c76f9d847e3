"""Chooses the twin of the hot path: the one in C where it can run, otherwise the one in Python.

Both do the same and make the same bytes, so workers with different twins talk to each other. The
one in C, ``torchweft._native``, is built with the package where there is a C compiler. It takes a
few times less time; the one in Python is written to be read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.free_threading import IS_FREE_THREADED
from torchweft.ids import ReferenceId

Buffer = bytes | bytearray | memoryview


class Native(Protocol):
    """The parts of ``torchweft._native``; those of the plain twin say what they do."""

    Link: type[Any]
    """A connection; see ``io.link``."""
    Lease: type[Any]
    """The right of one thread to read some connections; see ``worker.calls``."""

    def set_dtype(
        self,
        dtype: torch.dtype,
        number: int,
        dlpack_code: int,
        bits: int,
        is_differentiable: bool,
        /,
    ) -> None:
        """Takes a dtype of ``codec.tensors``; called once for each."""

    def set_value_parts(self, unfold: Callable[..., Any], rebuilders: list[Any], /) -> None:
        """Takes what ``codec.values`` needs of Python; called once."""

    def encode_tensors(self, tensors: Sequence[Tensor], /) -> tuple[bytearray, bool] | None:
        """Does as ``tensors.encode_tensors``; None for tensors that it leaves to the plain twin."""

    def decode_tensors(self, data: Buffer, position: int, /) -> tuple[list[Tensor], bytes] | None:
        """Does as ``tensors.decode_tensors``; None for tensors that it leaves to the plain twin."""

    def encode_values(
        self,
        value: object,
        tensors: list[Tensor],
        receiver: int,
        home_of: Callable[[Any], ReferenceId | None],
        /,
    ) -> bytes | Literal[False]:
        """Does as ``values.encode``; False where that returns None."""

    def encode_call(
        self,
        timeout_s: float,
        creation: int,
        name: bytes,
        span: bytes,
        code: bytes,
        values: tuple[Any, ...],
        tensors: list[Tensor],
        receiver: int,
        home_of: Callable[[Any], ReferenceId | None],
        inlines: bool,
        /,
    ) -> tuple[bytearray, bool | None] | Literal[False] | None:
        """Does as ``rpc.encoding.plain_frame``; None also for what is too large."""

    def decode_values(
        self,
        data: Buffer,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        resolve: Callable[[bytes], Any],
        come_home: Callable[[ReferenceId], Any],
        /,
    ) -> Any:
        """Does as ``values.decode`` without a limit; NotImplemented for malformed bytes."""

    def decode_call(self, control: Buffer, /) -> Any:
        """Does as ``wire.messages.decode_call``."""

    def decode_message(
        self,
        control: Buffer,
        start: int,
        end: int,
        most_tensors: int,
        resolve: Callable[[bytes], Any],
        come_home: Callable[[ReferenceId], Any],
        /,
    ) -> Any:
        """Does as ``Decoder.open`` in ``rpc.decoding``; NotImplemented for what it leaves to it."""

    def encode_result(
        self,
        number: int,
        context_id: int,
        result: object,
        receiver: int,
        most_tensors: int,
        home_of: Callable[[Any], ReferenceId | None],
        /,
    ) -> bytearray | Literal[False] | None:
        """Returns the ``REPLY`` of ``Worker.reply`` in ``rpc.worker``.

        False for a result that needs a pickle; None for others that it leaves.
        """


def _find() -> tuple[Native | None, str]:
    """Returns the module in C, if it is to be used, and why this twin was chosen."""
    setting, variable = knobs.NATIVE.get(), knobs.NATIVE.variable
    if setting not in ("auto", "0", "1"):
        raise ConfigurationError(f"{variable}={setting} is none of auto, 0, 1")
    if setting == "0":
        return None, f"{variable}=0 turns the native twin off"
    module, reason = _load()
    if module is None and setting == "1":
        raise ConfigurationError(f"{variable}=1 demands the native twin, but {reason}")
    return module, reason


def _load() -> tuple[Native | None, str]:
    if IS_FREE_THREADED:
        return None, "it relies on the interpreter lock, and this Python is free-threaded"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None, f"torch {torch.__version__} has no table of DLPack functions; 2.10 has"
    try:
        module = importlib.import_module("torchweft._native")
    except ImportError as error:
        return None, f"it was not built, as there was no C compiler at installation ({error})"
    return cast(Native, module), "it was built for this Python, and torch offers its tensors"


native, reason = _find()
"""The twin in C, or None; and why, as ``torchweft doctor`` tells it."""
