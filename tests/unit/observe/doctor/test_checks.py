"""Each check on made-up facts: the five broken surroundings, and those that are well."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from torchweft.channel.rdma import NO_DEVICE
from torchweft.hybrid import Facts as Devices
from torchweft.observe.doctor.examining import diagnose
from torchweft.observe.doctor.facts import HostFacts, PairFacts
from torchweft.observe.doctor.findings import Diagnosis, Level
from torchweft.observe.doctor.links import NetworkLink

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
    0.0,
    Devices("host0"),
)
OTHER = replace(WELL, worker="worker1", host="host1", devices=Devices("host1"))
PAIR = PairFacts("worker0", "worker1", "", 6e-5, 5e9, 1e10, (("shm", ""), ("cma", "")))


def found(*facts: HostFacts, pairs: Any = (PAIR,)) -> Diagnosis:
    return Diagnosis(tuple(diagnose(facts, pairs)))


def test_a_group_that_is_well_has_no_error() -> None:
    diagnosis = found(WELL, replace(OTHER, python="3.11.2", torch="2.13.1+cu126"))
    assert diagnosis.is_well
    text = str(diagnosis)
    assert text.endswith("\nall is well")
    assert "60 us a call, 5.0 GB/s of a tensor (10.0 GB/s is a copy in memory)" in text
    assert "collectives   all workers: gloo: CPUs over Ethernet" in text
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
    assert "1 errors" in str(diagnosis)


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


def test_the_limit_between_hosts_is_the_network() -> None:
    def rates(link: NetworkLink) -> str:
        pair = replace(PAIR, is_one_host=False, is_one_network=False, link=link)
        return next(
            each.text for each in found(WELL, OTHER, pairs=[pair]).findings if each.check == "pair"
        )

    assert "5.0 GB/s of a tensor (1.25 GB/s is the speed of eth0);" in rates(
        NetworkLink("eth0", 1.25e9)
    )
    assert "(eth0 does not tell its speed);" in rates(NetworkLink("eth0"))
    assert "(the network between does not tell its speed);" in rates(NetworkLink())


def test_rdma_between_hosts_is_listed_or_its_obstacle_is_a_note() -> None:
    def texts(obstacle: str) -> tuple[str, list[str]]:
        pair = replace(PAIR, is_one_host=False, obstacles=(("rdma", obstacle),))
        findings = found(WELL, OTHER, pairs=[pair]).findings
        (rates,) = [each.text for each in findings if "GB/s of a tensor" in each.text]
        return rates, [each.text for each in findings if each.level is Level.NOTE]

    rates, notes = texts("")
    assert "rdma from 1 MiB" in rates
    assert not notes
    rates, notes = texts("the package nixl is not installed")
    assert "rdma" not in rates
    assert notes == ["no rdma: the package nixl is not installed"]
    # Most hosts have no such device, and miss nothing.
    assert texts(NO_DEVICE)[1] == []


def test_a_name_mixed_devices_and_memory_that_cannot_be_read_are_notes() -> None:
    odd = replace(OTHER, addresses=(), devices=Devices("host1", "cuda:0"), ptrace_scope=1)
    diagnosis = found(WELL, odd)
    notes = {each.check: each for each in diagnosis.findings if each.level is Level.NOTE}
    assert "/etc/hosts" in notes["names"].fix
    assert notes["ptrace"].where == "host1"
    assert "ptrace_scope is 1" in notes["ptrace"].text
    assert "ptrace_scope=0" in notes["ptrace"].fix
    assert "rank 1 on cuda:0" in notes["collectives"].text
    assert diagnosis.is_well
