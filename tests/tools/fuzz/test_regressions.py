"""Inputs that were once decoded wrongly. ``python -m tests.fuzz`` writes such lines."""

from __future__ import annotations

import contextlib
import json
import pickle

import pytest

from tests.fuzz import targets
from torchweft.errors import WeftError


def registration(**fields: object) -> bytes:
    sound = {"name": "worker0", "id": 0, "addresses": [], "main": "", "facts": {}}
    return json.dumps({**sound, **fields}).encode()


FOUND = [
    # A control part beyond the limit was accepted if all of it was in the receive buffer.
    ("frames", bytes([61 << 2 | 3]) + bytes(4) + (121).to_bytes(4, "little") + bytes(8 + 121)),
    # A call whose name ends beyond the message got the rest of the message as its name.
    ("messages", b"\1" + bytes(32) + b"\xff\xff" + bytes(8) + b"name"),
    # Tensors without elements are of a few bytes each, and came without any limit.
    ("inline", (b"\0\0\1" + bytes(12)) * 140_000),
    # A tensor of integers came from a graph, which no such tensor can.
    ("inline", b"\5\x10\1" + (4).to_bytes(4, "little") + b"\1" + bytes(11)),
    # Errors held a view under iteration, which crashes the garbage collector of older Pythons.
    ("buffer_table", b"\0" + (1).to_bytes(8, "little") + b"\1\0\0\0" + b"\xff" + bytes(24)),
    # A registration with fields of wrong types or values was accepted.
    ("membership", b"\0" + registration(main=[])),
    ("membership", b"\0" + registration(name=None)),
    ("membership", b"\0" + registration(id=-1)),
    ("membership", b"\0" + registration(addresses=[1])),
    ("membership", b"\1" + b'{"token": 1, "workers": [], "missing": []}'),
    # Very deeply nested brackets, and an infinite number, crashed the launcher.
    # A bytearray was allocated with the size that a pickle announced.
    ("allowed_pickles", pickle.BYTEARRAY8 + (1 << 28).to_bytes(8, "little") + b"few."),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_once_is_refused(name: str, data: bytes) -> None:
    target = targets.load(name)
    assert target.check_memory(data) is not None
    if target.bare is not None:
        with target.bare() as bare, contextlib.suppress(WeftError):
            bare(data)


def test_a_sparse_tensor_is_left_to_those_who_describe_tensors() -> None:
    # The encoder of a whole message leaves it among the tensors, the strict one takes it apart.
    name = b"torchweft.engine.codec.reducers:_sparse_coo"
    size = b"\x08\2\0\0\0" + 2 * (b"\3" + (2).to_bytes(8, "little"))
    parts = b"\x08\4\0\0\0" + b"\x0f" + (1).to_bytes(4, "little") + b"\x0f" + bytes(4) + size
    made = b"\x15" + len(name).to_bytes(4, "little") + name + parts + b"\2"
    assert targets.load("values").check_memory(made) is None
