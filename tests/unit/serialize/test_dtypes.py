from __future__ import annotations

import pytest
import torch

from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize import dtypes
from torchweft.serialize.dtypes import CODES, REAL_CODES, dtype_of

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
    assert all(dtype.is_complex for dtype in CODES.keys() - REAL_CODES.keys())


def test_numbers_do_not_change() -> None:
    # Workers of different versions exchange these numbers.
    assert [CODES[dtype] for dtype in (torch.bool, torch.float32, torch.bfloat16)] == [0, 7, 15]


def test_an_unknown_number_is_refused() -> None:
    with pytest.raises(ProtocolError, match="255"):
        dtype_of(255)


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CODES[torch.float8_e5m2]
    without = [None if number == code else dtype for number, dtype in enumerate(dtypes._BY_CODE)]
    monkeypatch.setattr(dtypes, "_BY_CODE", tuple(without))
    with pytest.raises(SerializationError, match=r"torch\.float8_e5m2, which torch"):
        dtype_of(code)
