"""Each check on made-up facts: the five broken surroundings, and those that are well."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from torchweft.errors import ProtocolError
from torchweft.observe.doctor import Diagnosis, Finding, Level, diagnose, merged, sample
from torchweft.reports import (
    HostFacts,
    PairFacts,
    WorkerFacts,
    decode,
    encode,
)

WELL = HostFacts(
    "worker0",
    "host0",
    "3.11.7",
    "2.13.0",
    "0.1.0",
    8 << 30,
    0,
    4096,
    (("eth0", 1500),),
    ("10.0.0.1",),
)
OTHER = replace(WELL, worker="worker1", host="host1")
PAIR = PairFacts(
    "worker0",
    "worker1",
    "",
    6e-5,
    5e9,
    1e10,
    (("shm", ""), ("cma", "")),
    inline_bytes=64 << 10,
    channels=(("shm", 128 << 10), ("cma", 1 << 20)),
)


def found(*facts: HostFacts, pairs: Any = (PAIR,)) -> Diagnosis:
    return Diagnosis(tuple(diagnose(facts, pairs)))


def test_the_twin_of_each_worker_is_told_and_what_brings_the_native_one() -> None:
    (told,) = [each for each in found(WELL, OTHER).findings if each.check == "twin"]
    assert (told.level, told.where) == (Level.GOOD, "all workers")
    plain = replace(OTHER, plain_because="torch 2.6.0 has no table of DLPack functions; 2.10 has")
    told = [each for each in found(WELL, plain).findings if each.check == "twin"]
    assert [(each.level, each.where) for each in told] == [
        (Level.GOOD, "worker0"),
        (Level.NOTE, "worker1"),
    ]
    assert "torch 2.6.0" in told[1].text
    assert told[1].fix == "pip install 'torch>=2.10'"
    unbuilt = replace(WELL, plain_because="it was not built, as there was no C compiler")
    assert "gcc" in next(each for each in found(unbuilt).findings if each.check == "twin").fix


def test_a_group_that_is_well_has_no_error() -> None:
    diagnosis = found(WELL, replace(OTHER, python="3.11.2", torch="2.13.1+cu126"))
    assert diagnosis.is_well
    text = str(diagnosis)
    assert text.endswith("\nall is well")
    assert "60 us a call, 5.0 GB/s of a tensor (10.0 GB/s is a copy in memory)" in text
    assert "collectives  all workers: gloo: CPUs over Ethernet" in text
    assert json.loads(json.dumps(diagnosis.as_json()))["is_well"] is True


@pytest.mark.parametrize(
    ("facts", "pair", "check", "where", "text", "fix"),
    [
        ({"shm_bytes": 64 << 20}, {}, "/dev/shm", "host1", "has 64 MiB", "--shm-size"),
        ({"torch": "2.6.0"}, {}, "versions", "workers", "2.6 on worker1", "same torch"),
        (
            {},
            {"error": "CallTimeout: no answer"},
            "pair",
            "worker0 -> worker1",
            "cannot be called: CallTimeout",
            "firewall",
        ),
        ({"descriptors": 200}, {}, "descriptors", "worker1", "has|may have 200", "ulimit -n 1024"),
        ({"weft": "0.2.0"}, {}, "versions", "workers", "different Weft", "same Weft"),
        ({"python": "3.12.1"}, {}, "versions", "workers", "3.12 on worker1", "same Python"),
        ({"mtu": (("eth0", 9000),)}, {}, "mtu", "eth0", "9000 on host1", "mtu 1500"),
        ({}, {"clock_s": 7.0}, "clock", "worker1", "+7.0 s off", "NTP"),
    ],
    ids=lambda value: next(iter(value), None) if isinstance(value, dict) else None,
)
def test_each_broken_surrounding_is_named(
    facts: dict[str, Any], pair: dict[str, Any], check: str, where: str, text: str, fix: str
) -> None:
    diagnosis = found(WELL, replace(OTHER, **facts), pairs=[replace(PAIR, **pair)])
    (error,) = [each for each in diagnosis.findings if each.level is Level.ERROR]
    assert (error.check, error.where) == (check, where)
    assert any(each in error.text for each in text.split("|"))
    assert fix in error.fix
    assert not diagnosis.is_well
    assert "\n1 error" in str(diagnosis)


def test_a_worse_channel_is_a_note_with_its_reason_and_the_command() -> None:
    reason = "the kernel does not permit it (see ptrace(2), access mode)"
    pair = replace(PAIR, obstacles=(("shm", ""), ("cma", reason)))
    diagnosis = found(WELL, OTHER, pairs=[pair])
    (note,) = [each for each in diagnosis.findings if each.level is Level.NOTE]
    assert note.text == f"no cma: {reason}"
    assert "SYS_PTRACE" in note.fix
    assert diagnosis.is_well
    # Between hosts there is no such channel, so nothing is missing.
    between = replace(pair, is_one_host=False)
    assert not [e for e in found(WELL, OTHER, pairs=[between]).findings if e.level is Level.NOTE]


def test_rdma_between_hosts_is_listed_or_its_obstacle_is_a_note() -> None:
    def texts(obstacle: str) -> tuple[str, list[str]]:
        channels = () if obstacle else (("rdma", 1 << 20),)
        obstacles = (("rdma", obstacle),)
        pair = replace(PAIR, is_one_host=False, obstacles=obstacles, channels=channels)
        findings = found(WELL, OTHER, pairs=[pair]).findings
        (rates,) = [each.text for each in findings if "GB/s of a tensor" in each.text]
        return rates, [each.text for each in findings if each.level is Level.NOTE]

    rates, notes = texts("")
    assert "rdma from 1 MiB" in rates
    assert not notes
    rates, notes = texts("the package nixl is not installed")
    assert "rdma" not in rates
    assert notes == ["no rdma: the package nixl is not installed"]


def test_each_size_has_its_channel() -> None:
    def channels(*usable: tuple[str, int], inline_bytes: int = 64 << 10) -> str:
        pair = replace(PAIR, channels=usable, inline_bytes=inline_bytes)
        (rates,) = [
            each.text for each in found(WELL, pairs=[pair]).findings if each.check == "pair"
        ]
        return rates.partition("channels: ")[2]

    shm, cma, striped = ("shm", 128 << 10), ("cma", 1 << 20), ("striped", 2 << 20)
    assert channels(shm, cma, striped) == (
        "inline, stream from 64 KiB, shm from 128 KiB (where it has no room: cma from 1 MiB, "
        "striped from 2 MiB)"
    )
    assert channels(striped) == "inline, stream from 64 KiB, striped from 2 MiB"
    assert channels(shm) == "inline, stream from 64 KiB, shm from 128 KiB"
    assert channels() == "inline, stream from 64 KiB"
    assert channels(("shm", 64 << 10)) == "inline, shm from 64 KiB"
    assert channels(("shm", 32 << 10)) == "inline, shm from 64 KiB"


def test_pairs_of_equal_channels_are_one_line() -> None:
    def named(number: int, text: str, check: str = "channel") -> Finding:
        return Finding(Level.NOTE, check, f"pair {number}", text)

    findings = [named(number, "no cma") for number in range(5)] + [named(5, "no shm")]
    rates = [named(number, "same", "pair") for number in range(2)]
    assert [(each.where, each.text) for each in merged([*findings, *rates])] == [
        ("pair 0, pair 1, pair 2 and 2 more pairs", "no cma"),
        ("pair 5", "no shm"),
        ("pair 0", "same"),
        ("pair 1", "same"),
    ]


def test_a_sample_of_pairs_has_all_workers_and_no_pair_twice() -> None:
    names = [f"worker{number}" for number in range(16)]
    rank = {name: number for number, name in enumerate(names)}
    pairs = [PairFacts(one, other) for one in names for other in names if one != other]
    chosen = sample(pairs, rank, 32)
    assert len({each.where for each in chosen}) == 32
    assert {each.caller for each in chosen} == {each.callee for each in chosen} == set(names)
    assert {each.where for each in sample(pairs, rank, 1000)} == {each.where for each in pairs}
    assert len({each.caller for each in sample(pairs, rank, 8)}) == 8
    assert sample([], rank, 3) == sample(pairs, rank, 0) == []


def test_facts_travel_as_text() -> None:
    facts = WorkerFacts(WELL, (PAIR, replace(PAIR, error="lost")))
    assert decode(WorkerFacts, encode(facts)) == facts
    assert decode(PairFacts, encode(PAIR)) == PAIR
    for wrong in ("[", "{}", encode(facts).replace(b"1500", b'1500, "x"')):
        with pytest.raises(ProtocolError):
            decode(WorkerFacts, wrong)
