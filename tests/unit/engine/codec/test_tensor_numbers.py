from __future__ import annotations

import types

import pytest
import torch

from torchweft.engine.codec.tensors import CODES, device_code, device_of, dtype_of
from torchweft.errors import ProtocolError, SerializationError

NEWEST_KNOWN = (2, 15)
"""The newest torch whose dtypes all have numbers; dtypes of a later torch are refused by name."""


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (NEWEST_KNOWN[0], NEWEST_KNOWN[1] + 1),
    reason="a torch that is newer than the numbers; its new dtypes are refused by name",
)
def test_every_dtype_with_plain_memory_has_a_number() -> None:
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = {"torch.bit"}  # torch's alias for uint1, which no tensor operation supports
    assert {dtype for dtype in known - quantised if str(dtype) not in left_out} <= set(CODES)
    assert {dtype_of(code) for code in CODES.values()} == set(CODES)


def test_numbers_do_not_change() -> None:
    # Workers of different versions exchange these numbers.
    assert [CODES[dtype] for dtype in (torch.bool, torch.float32, torch.bfloat16)] == [0, 7, 15]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    two = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: two)


@pytest.mark.usefixtures("two_devices")
def test_a_missing_device_says_what_is_here() -> None:
    with pytest.raises(SerializationError, match="'w' has only cuda:0, cuda:1") as caught:
        device_of(device_code(torch.device("cuda:2")), 4, "w")
    assert "tensor 4" in str(caught.value)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(SerializationError, match=r"meta.*\.cpu\(\)"):
        device_code(torch.device("meta"))
    with pytest.raises(ProtocolError):
        device_of(200 << 8, 0, "w")
    with pytest.raises(SerializationError, match="no hpu device"):
        device_of(device_code(torch.device("hpu:0")), 0, "w")
