from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ProtocolError
from weft.ids import WorkerInfo
from weft.protocol.membership import Directory, Registration, assemble


def registration(rank: int, name: str = "") -> Registration:
    addresses = (f"unix:@{rank}", f"tcp:h:{rank}")
    return Registration(name or f"worker{rank}", rank, addresses, main="train", facts={"a": [1]})


def group(*ranks: int) -> dict[int, Registration]:
    return {rank: registration(rank) for rank in ranks}


def test_a_registration_survives() -> None:
    assert Registration.decode(registration(3).encode()) == registration(3)
    assert registration(3).info == WorkerInfo("worker3", 3)


def test_a_directory_survives() -> None:
    directory = assemble(group(0, 1, 2), 3, "token", 0.5)
    assert Directory.decode(directory.encode()) == directory
    refusal = assemble(group(1), 3, "token", 0.5)
    assert Directory.decode(refusal.encode()) == refusal


def test_a_complete_group_is_in_order_of_rank() -> None:
    directory = assemble(dict(reversed(group(0, 1, 2).items())), 3, "token", 0.5)
    assert directory.refusal == ""
    assert [worker.id for worker in directory.workers] == [0, 1, 2]
    assert directory.token == "token"


def test_who_is_missing_is_named_with_who_came() -> None:
    directory = assemble(group(0, 2), 5, "token", 1.25)
    assert directory.missing == (1, 3, 4)
    assert directory.workers == ()
    assert "ranks 1, 3, 4 of 5 did not join within 1.2 s" in directory.refusal
    assert "'worker0' (rank 0), 'worker2' (rank 2)" in directory.refusal


def test_one_is_missing() -> None:
    assert assemble(group(0), 2, "token", 1.0).refusal.startswith("rank 1 of 2 did not join")


def test_a_long_list_is_cut_short_but_not_the_field() -> None:
    directory = assemble({}, 100, "token", 1.0)
    assert "15, ... of 100" in directory.refusal
    assert "came: nobody" in directory.refusal
    assert directory.missing == tuple(range(100))


def test_two_workers_of_one_name_are_both_named() -> None:
    workers = {0: registration(0), 1: registration(1, "twin"), 2: registration(2, "twin")}
    directory = assemble(workers, 3, "token", 1.0)
    assert directory.has_duplicates
    assert "ranks 1 and 2 both call themselves 'twin'" in directory.refusal
    assert directory.missing == ()


values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=2)
keys = st.sampled_from(
    ["name", "id", "addresses", "main", "facts", "token", "workers", "refusal", "missing", "other"]
)


@settings(max_examples=80)
@given(
    st.dictionaries(keys, values).map(lambda fields: json.dumps(fields).encode())
    | values.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=10)
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for reader in (Registration.decode, Directory.decode):
        with contextlib.suppress(ProtocolError):
            assert reader(data)


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"workers": [[]], "missing": []}', b"null"])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Directory.decode(data)
    with pytest.raises(ProtocolError):
        Registration.decode(data)


WRONG = {
    "name": [None, 1, ["worker"]],
    "id": [None, "0", True, 1.0, -1],
    "addresses": [None, 1, [1], [None]],
    "main": [None, 0, []],
    "facts": [None, [], "x"],
    "later_rank": ["1", False, 1.5, -1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_registration_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    told = {**registration(3).as_json(), field: value}
    with pytest.raises(ProtocolError, match="makes no sense"):
        Registration.decode(told)
    with pytest.raises(ProtocolError, match="makes no sense"):
        Directory.decode(json.dumps({"token": "t", "workers": [told], "missing": []}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("token", 1), ("refusal", None), ("missing", ["1"]), ("has_duplicates", 0), ("workers", [1])],
)
def test_a_directory_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    told = {**json.loads(assemble(group(0), 1, "token", 0.5).encode()), field: value}
    with pytest.raises(ProtocolError, match="makes no sense"):
        Directory.decode(json.dumps(told).encode())
