from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from tests.thorough import examples
from torchweft.engine.protocol.registration import (
    Devices,
    Directory,
    Registration,
    assemble,
    differences,
    why_apart,
    why_not_by_value,
)
from torchweft.errors import (
    ConfigurationError,
    DuplicateName,
    ProtocolError,
    RendezvousError,
    RendezvousTimeout,
)
from torchweft.ids import WorkerInfo


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
    for error in (
        RendezvousTimeout("late", (0, 2)),
        RendezvousError("apart"),
        DuplicateName("same"),
        ConfigurationError("wrong"),
    ):
        refusal = Directory.refused(error)
        assert Directory.decode(refusal.encode()) == refusal
        made = refusal.error(1.5)
        assert (type(made), str(made)) == (type(error), str(error))
    timeout = Directory.refused(RendezvousTimeout("late", (0, 2))).error(1.5)
    assert isinstance(timeout, RendezvousTimeout)
    assert (timeout.missing, timeout.elapsed_s) == ((0, 2), 1.5)
    assert type(Directory("", (), "no", "SystemExit").error(0.0)) is RendezvousError


def test_a_complete_group_is_in_order_of_rank() -> None:
    directory = assemble(dict(reversed(group(0, 1, 2).items())), 3, "token", 0.5)
    assert directory.refusal == ""
    assert [worker.id for worker in directory.workers] == [0, 1, 2]
    assert directory.token == "token"


def test_who_is_missing_is_named_with_who_came() -> None:
    with pytest.raises(RendezvousTimeout, match=r"ranks 1, 3, 4 of 5.* 1\.2 s") as e:
        assemble(group(0, 2), 5, "token", 1.25)
    assert e.value.missing == (1, 3, 4)
    assert "'worker0' (rank 0), 'worker2' (rank 2)" in str(e.value)


def test_one_is_missing() -> None:
    with pytest.raises(RendezvousTimeout, match=r"^rank 1 of 2 did not join"):
        assemble(group(0), 2, "token", 1.0)


def test_a_long_list_is_cut_short_but_not_the_field() -> None:
    with pytest.raises(RendezvousTimeout, match=r"15, \.\.\. of 100.*came: nobody") as caught:
        assemble({}, 100, "token", 1.0)
    assert caught.value.missing == tuple(range(100))


def placed(rank: int, network: object, *, is_far: bool, has_secret: bool) -> Registration:
    facts = {
        "host": f"host-{network}",
        "network": network,
        "is_far": is_far,
        "has_secret": has_secret,
    }
    return Registration(f"worker{rank}", rank, (), facts=facts)


@pytest.mark.parametrize(
    ("networks", "far"),
    [
        ("aaaa", (False,) * 4),
        ("abab", (True,) * 4),
        ("a", (False,)),
        ("", ()),
        # An unknown network does not count.
        (("", "a", 5, None, []), (False,) * 5),
    ],
)
def test_workers_that_reach_each_other(networks: list[object], far: tuple[bool, ...]) -> None:
    workers = [
        placed(rank, network, is_far=is_far, has_secret=False)
        for rank, (network, is_far) in enumerate(zip(networks, far, strict=True))
    ]
    assert why_apart(workers) == ""


def test_workers_of_two_hosts_without_a_secret_are_told_how_to_get_one() -> None:
    workers = [placed(rank, "aab"[rank], is_far=False, has_secret=False) for rank in range(3)]
    said = why_apart(workers)
    assert "'worker0' (rank 0, host host-a) and worker 'worker2' (rank 2, host host-b)" in said
    assert "torchweft secret new weft.secret" in said
    assert "export WEFT_SECRET_FILE=weft.secret" in said
    assert why_apart(reversed(workers))


def test_those_that_have_a_secret_and_listen_on_loopback_are_named() -> None:
    workers = [placed(rank, "aab"[rank], is_far=rank != 1, has_secret=True) for rank in range(3)]
    said = why_apart(workers)
    assert "worker 'worker2' (rank 2, host host-b) is on another host" in said
    assert "loopback only: 'worker1' (rank 1, host host-a)." in said
    assert "WEFT_LISTEN" in said
    assert "secret" not in said


def running(rank: int, versions: object) -> Registration:
    return Registration(f"worker{rank}", rank, (), facts={"versions": versions})


HERE = {"Python": "3.11", "torch": "2.13.0+cpu", "Weft": "0.1.0"}


@cases(
    ("versions", "told"),
    [
        (HERE, ""),
        ({**HERE, "torch": "2.13.0+cu126"}, ""),
        ({**HERE, "torch": "2.12.1"}, "torch 2.12.1 (here 2.13.0+cpu)"),
        (
            {"Python": "3.12", "torch": "2.13.0", "Weft": "0.2.0"},
            "Python 3.12 (here 3.11), Weft 0.2.0 (here 0.1.0)",
        ),
        ({}, ""),
        ({"Python": 3, "torch": None, "Weft": [1], "other": "x"}, ""),
        (["3.12"], ""),
        (None, ""),
        ({"Weft": "9" * 1000}, f"Weft {'9' * 32} (here 0.1.0)"),
    ],
)
def test_versions_that_differ_are_named(versions: object, told: str) -> None:
    assert differences(running(0, HERE), running(1, versions)) == told


def test_functions_by_value_stay_within_one_minor_version_of_python() -> None:
    mine, same = running(0, HERE), running(1, {**HERE, "torch": "2.12.0"})
    assert why_not_by_value(mine, same) == ""
    assert why_not_by_value(mine, running(1, {})) == ""
    said = why_not_by_value(mine, running(1, {**HERE, "Python": "3.12"}))
    assert said.startswith("worker 'worker1' runs Python 3.12, this one 3.11: functions do not")


def strict_about_versions(rank: int, torch: str, *, refuses: bool = True) -> Registration:
    facts = {"versions": {**HERE, "torch": torch}, "refuses_versions": refuses, "host": f"h{rank}"}
    return Registration(f"worker{rank}", rank, (), facts=facts)


def test_another_minor_version_of_torch_is_refused_to_all() -> None:
    first, alike = strict_about_versions(0, "2.13.0+cpu"), strict_about_versions(1, "2.13.1")
    assert not assemble({0: first, 1: alike}, 2, "token", 0.5).refusal
    other = strict_about_versions(1, "2.7.1", refuses=False)
    with pytest.raises(ConfigurationError) as caught:
        assemble({0: first, 1: other}, 2, "token", 0.5)
    assert str(caught.value).startswith(
        "the workers run different versions of torch: torch 2.13.0+cpu on worker 'worker0' "
        "(rank 0, host h0), torch 2.7.1 on worker 'worker1' (rank 1, host h1). Install one "
        "version on all hosts, for instance: pip install torch==2.13.0."
    )
    allowed = strict_about_versions(0, "2.13.0", refuses=False)
    assert not assemble({0: allowed, 1: other}, 2, "token", 0.5).refusal
    untold = Registration("worker1", 1, (), facts={"versions": {"torch": 2}})
    assert not assemble({0: first, 1: untold}, 2, "token", 0.5).refusal


def test_two_workers_of_one_name_are_both_named() -> None:
    workers = {0: registration(0), 1: registration(1, "twin"), 2: registration(2, "twin")}
    with pytest.raises(DuplicateName, match="ranks 1 and 2 both call themselves 'twin'"):
        assemble(workers, 3, "token", 1.0)


def test_devices_that_do_not_fit_are_refused_to_all() -> None:
    facts = Devices({"worker0": {"cpu": "cuda:3"}}, (), 3).as_facts()
    wrong = Registration("worker1", 1, (), facts=facts)
    assert not assemble({**group(0), 1: wrong}, 2, "token", 0.5).refusal
    counted = Registration("worker0", 0, (), facts=Devices({}, ("cuda:0",), 1).as_facts())
    with pytest.raises(ConfigurationError, match=r"^Node worker1 has unexpected target devices"):
        assemble({0: counted, 1: wrong}, 2, "token", 0.5)


values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=2)
keys = st.sampled_from(
    ["name", "id", "addresses", "main", "facts", "token", "workers", "refusal", "missing", "other"]
)


@settings(max_examples=examples(80))
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


@cases(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_registration_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    told = {**registration(3).as_json(), field: value}
    with pytest.raises(ProtocolError, match="is malformed"):
        Registration.decode(told)
    with pytest.raises(ProtocolError, match="is malformed"):
        Directory.decode(json.dumps({"token": "t", "workers": [told], "missing": []}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", 1),
        ("refusal", None),
        ("missing", ["1"]),
        ("kind", 0),
        ("workers", [1]),
    ],
)
def test_a_directory_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    told = {**json.loads(assemble(group(0), 1, "token", 0.5).encode()), field: value}
    with pytest.raises(ProtocolError, match="is malformed"):
        Directory.decode(json.dumps(told).encode())
