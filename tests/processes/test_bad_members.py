"""Attacks by a hostile member, which has the secret, on a strict worker, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import strange_members, unpickling
from tests.processes.bad_members import MEMBERS, OPTIONS, SETTINGS, MemberRow
from tests.processes.stranger_groups import (
    ATTACKER,
    FEW_THREADS,
    MEMORY_BYTES,
    OTHER,
    SLOWEST_S,
    VICTIM,
    Group,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")


@pytest.fixture(scope="module")
def group(warm_process: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    warm = OpenWorkers(warm_process, "tests.processes.strange_members")
    made = Group(warm, tmp_path_factory.mktemp("group"), settings=SETTINGS, **OPTIONS)
    made.join(ATTACKER, 2)
    yield made
    made.close()
    warm.close()


@pytest.mark.parametrize("row", MEMBERS, ids=lambda row: row.title)
def test_a_bad_member(group: Group, row: MemberRow, tmp_path: Path) -> None:
    mark = tmp_path / "was_here"
    group.do(VICTIM, unpickling.watch)
    before = group.state()
    try:
        result = row.attack(group, str(mark))
        slowest_s = group.do(OTHER, strange_members.calls_go_on, VICTIM)
        after = group.state()
    finally:
        group.do(VICTIM, unpickling.unwatch)
    assert result == row.result
    assert not mark.exists()
    assert after.unpickled == []
    assert after.members == before.members
    assert after.threads <= before.threads + FEW_THREADS
    assert after.descriptors <= before.descriptors + FEW_THREADS
    assert after.largest_bytes <= before.largest_bytes + MEMORY_BYTES
    assert slowest_s < SLOWEST_S
