from __future__ import annotations

import json

import pytest

from tests.reports import calling, made, report, served, thread
from torchweft.errors import ProtocolError
from torchweft.reports import (
    Event,
    FunctionCounts,
    HeldReference,
    NumberRow,
    NumberTable,
    Report,
    Traffic,
    decode,
    encode,
)

FULL = report(
    "a",
    thread(waits=(calling("a", 1, "b"),), frames=("x", "y")),
    made=(made("a", 1, "b"),),
    served=(served("b", 7),),
    functions=(FunctionCounts("f", "in", 3, 1, {"-80": 3}),),
    traffic=(Traffic("b", 5, 7, {"sent shm": 9}),),
    references=(HeldReference("R", "a", "p.py:3", 4),),
    events=(Event(2.0, "text"),),
    numbers=(NumberTable("t", ("of",), (NumberRow(("x",), {"n": 1.5}, {"ages": {"0": 2}}),)),),
)


@pytest.mark.parametrize(
    "change", [{"slots": "16"}, {"made": {}}, {"identity": None}, {"cpu_s": []}]
)
def test_a_field_of_another_type_is_refused(change: dict[str, object]) -> None:
    told = json.loads(encode(FULL)) | change
    with pytest.raises(ProtocolError, match=f"{next(iter(change))} of a report is a"):
        decode(Report, json.dumps(told).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(Report, data)
