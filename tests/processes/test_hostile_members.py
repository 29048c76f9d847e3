"""Members that send invalid data are turned away; the victim and all others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import hostility

ATTEMPTS = 60
FEW = 12
FIRST_RANK = 7000
"""No greeting claims these by accident: a worker replaces a worker of the same rank."""
MEMORY_BYTES = 512 << 20
"""The attackers announce some gigabytes."""
VICTIM, OTHER, ATTACKER = "victim", "other", "attacker"


@pytest.fixture
def workers(warm_process: WarmProcess, tmp_path: Path) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, "tests.processes.hostility", "tests.fuzz.targets.stream")
    for rank, name in enumerate((VICTIM, OTHER, ATTACKER), FIRST_RANK):
        started.do(name, hostility.join, name, rank, f"file://{tmp_path / 'store'}")
    yield started
    for name in (VICTIM, OTHER, ATTACKER):
        started.kill(name)
    started.close()


@pytest.mark.parametrize("send", [hostility.send_frames, hostility.send_greetings])
def test_a_worker_outlives_what_hostile_members_send(workers: OpenWorkers, send: object) -> None:
    before = workers.do(OTHER, hostility.ask, VICTIM)
    outcomes = workers.do(ATTACKER, send, VICTIM, 11, ATTEMPTS)
    assert outcomes["welcome"] > FEW
    after = workers.do(OTHER, hostility.ask, VICTIM)
    assert after["name"] == VICTIM
    assert not after["surprises"], after["surprises"][0]
    assert after["threads"] < before["threads"] + FEW
    assert after["largest_bytes"] < before["largest_bytes"] + MEMORY_BYTES
    assert workers.do(VICTIM, hostility.ask, OTHER)["name"] == OTHER
