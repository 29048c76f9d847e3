"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.functions import stop
from tests.contract.processes.test_open_groups import Group, call, join, names
from tests.open_workers import OpenWorkers
from torchweft.engine.protocol.joining import Admission, Steps
from torchweft.errors import (
    DuplicateName,
)
from torchweft.rpc import joining

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def group(warm: OpenWorkers, tmp_path: Path) -> Iterator[Group]:
    made = Group(warm, tmp_path / "store")
    yield made
    made.close()


def join_unasked(name: str, rank: int, method: str) -> None:
    """Joins as a hostile worker does: does not ask the worker whose name or rank it claims."""
    honest = joining.introduce

    def introduce(admission: Admission) -> Steps[None]:
        others = {
            worker: each
            for worker, each in admission.earlier.items()
            if each.name != name and each.rank != rank
        }
        return honest(admission._replace(earlier=others))

    joining.introduce = introduce
    join(name, rank, None, method)


@pytest.mark.parametrize(("name", "rank"), [("a", 5), ("d", 0), ("a", 0)])
def test_a_name_or_rank_is_claimed_from_others(group: Group, name: str, rank: int) -> None:
    for number, each in enumerate("abc"):
        group.join(each, number)
    assert group.do("b", call, "a") == 4.0  # The others have no connection to it.
    group.names.append("other")
    with pytest.raises(DuplicateName, match=r"'[bc]' \(rank [12]\) knows another worker that is"):
        group.do("other", join_unasked, name, rank, group._method)
    for each in "abc":
        assert group.do(each, names) == [("a", 0), ("b", 1), ("c", 2)]
    assert group.do("b", call, "a") == group.do("c", call, "a") == 4.0


def test_the_name_of_a_stopped_worker_is_claimed_from_one_with_a_link(group: Group) -> None:
    group.join("a", 0)
    group.join("b", 1)
    assert group.do("b", call, "a") == 4.0
    process = group.do("a", os.getpid)
    group.names.append("other")
    stop(process)
    try:
        with pytest.raises(DuplicateName, match="knows another worker that is there already"):
            group.do("other", join_unasked, "a", 0, group._method)
    finally:
        os.kill(process, signal.SIGCONT)
    assert group.do("b", call, "a") == 4.0
