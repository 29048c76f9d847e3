"""Values without pickle: bytes decode to values or are refused, and the values encode again."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.memory import at_end_of, exact_memory
from tests.fuzz.target import Bare, Target
from tests.marked import names_of
from torchweft.engine.codec.makers import leave_to_pickle
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.engine.codec.tensors import is_dense
from torchweft.engine.codec.values import Encoder, decode, encode
from torchweft.errors import SerializationError, WeftError
from torchweft.ids import ReferenceId, WorkerInfo
from torchweft.native import native

warnings.filterwarnings("ignore", "Sparse")


class _Reference:
    """A value that stays outside of payloads, as references do."""

    __slots__ = ()


class _Home:
    """A reference that comes home."""

    __slots__ = ("id",)

    def __init__(self, id: ReferenceId) -> None:
        self.id = id


for _kind in (_Reference, _Home):
    leave_to_pickle(_kind)


def found() -> None:
    """The function that every name resolves to here."""


_LENGTH_LIMIT = 512
_EXTERNALS = (_Reference(), _Reference())


def _tensors() -> list[Tensor]:
    """Returns tensors that fit together, and some that do not."""
    return [
        torch.zeros(3),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.int8),
        torch.ones(2, dtype=torch.float64),
        torch.tensor([0, 2, 3]),
        torch.zeros(()),
    ]


def _resolve(name: bytes) -> Any:
    return found


def _come_home(reference: ReferenceId) -> _Home:
    return _Home(reference)


def _home_of(value: object) -> ReferenceId | None:
    return value.id if isinstance(value, _Home) else None


def _encoder() -> Encoder:
    return Encoder(True, (_Reference,))


def run(data: bytes) -> Exception | None:
    """Decodes a value, encodes it, and decodes it again."""
    try:
        value = decode(data, _tensors(), _EXTERNALS, _resolve, _come_home)
    except WeftError as error:
        return error
    _check_exact(value)
    encoder = _encoder()
    try:
        again = encoder.encode(value)
    except (SerializationError, RecursionError):
        return None  # A name may resolve to an object that cannot be sent.
    decode(again, encoder.tensors, encoder.externals, _resolve, _come_home)
    return None


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Yields the native decoder, for tensors that all inputs share."""
    tensors, memory = _tensors(), exact_memory(_LENGTH_LIMIT)

    def decode_natively(data: bytes) -> bool:
        assert native is not None
        payload = at_end_of(memory, data)
        value = native.decode_values(payload, tensors, _EXTERNALS, _resolve, _come_home)
        for tensor in tensors:
            vars(tensor).clear()
        return value is not NotImplemented

    yield decode_natively


def _check_exact(value: object) -> None:
    """Asserts that a value which both encoders take is encoded the same by both."""
    tensors: list[Tensor] = []
    payload = encode(value, tensors, True, _home_of)
    if payload is None or not all(map(is_dense, tensors)):
        return  # Left to pickle, here or where the tensors are described.
    arrived = decode(payload, tensors, (), _resolve, _come_home)
    assert type(arrived) is type(value)
    try:
        strict = _encoder().encode(value)
    except (SerializationError, RecursionError):
        return  # A reference that goes home.
    assert payload == strict


def _payloads() -> list[bytes]:
    tensors = _tensors()
    own: list[Any] = [1]
    own.append(own)
    attributed = torch.zeros(1)
    attributed.note = "kept"  # type: ignore[attr-defined]
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2))
    values: list[Any] = [
        (None, True, False, -5, "text", 2.5, b"bytes", found),
        (None, True, False, -5, 1 << 200, 2.5, math.nan, 1 + 2j, "text", b"bytes"),
        [[], (), {}, set(), frozenset(), {"key": [1, {2: (3,)}]}, {1, "a"}, frozenset([None])],
        (own, own, {"self": own}),
        (tensors[0], [tensors[1], tensors[0]], attributed, torch.nn.Parameter(torch.zeros(2))),
        (torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided),
        (torch.channels_last, found, torch.add, torch.nn.Linear, OrderedDict(a=1)),
        (_EXTERNALS[0], _EXTERNALS[1], _EXTERNALS[0]),
        coo,
        (WorkerInfo("worker0", 1), SerializationError("no")),
    ]
    home = encode((1, _Home(ReferenceId(1, 2, 3))), [], True, _home_of)
    assert home is not None
    return [*(_encoder().encode(value) for value in values), home]


def seeds() -> list[bytes]:
    """Returns values of every kind, alone and inside each other."""
    return _payloads()


TARGET = Target(
    "values",
    run,
    seeds,
    words=tuple(name.encode() for name in sorted(names_of(rebuilds_plain))),
    length_limit=_LENGTH_LIMIT,
    bare=None if native is None else bare,
)
