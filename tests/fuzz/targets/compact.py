"""Compact values: bytes decode to plain values or are refused, and the values encode again."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.target import Target
from torchweft.errors import ProtocolError
from torchweft.serialize.compact import decode, encode


class _Other:
    """A value that is not plain."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _encode_other(value: Any) -> bytes | None:
    return value.data if isinstance(value, _Other) else None


def _trip(data: bytes) -> bytes | None:
    places: list[int] = []
    values = decode(data, 0, places, _Other)
    assert len(values) == data[0]
    for place in places:
        values[place].requires_grad_()
    return encode(values, [], _encode_other)


def run(data: bytes) -> Exception | None:
    """Decodes values, encodes them, and does both again."""
    try:
        once = _trip(data)
    except ProtocolError as error:
        return error
    if once is not None:
        assert _trip(once) == once
    return None


def seeds() -> list[bytes]:
    """Returns values of every kind, alone and inside each other."""
    parameter = torch.ones(2, requires_grad=True)
    dtypes = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    tensors = [torch.ones(1, 2, dtype=getattr(torch, name)) for name in dtypes]
    lists: list[tuple[Any, ...]] = [
        (),
        (None, True, False, -5, 2.5, "text", b"bytes"),
        ((1, (2, (3,))), [4, [5]], {"key": 6, (7, 8): {}}),
        tuple(tensors),
        (torch.ones(3, dtype=torch.complex64), torch.ones(1, dtype=torch.complex128)),
        (torch.ones(()), parameter, [torch.zeros(1)]),
        (_Other(b"reference"), [_Other(b"")]),
        (((((((((1,),),),),),),),),),
    ]
    encoded = [encode(values, [], _encode_other) for values in lists]
    assert None not in encoded[:-1]
    return [data for data in encoded if data is not None]


TARGET = Target("compact", run, seeds)
