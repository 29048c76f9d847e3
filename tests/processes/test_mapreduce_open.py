"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes import mapreduce_functions_u as functions
from tests.contract.processes.test_mapreduce_open import Group
from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import mapreduce_internals_u as internals

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, functions.__name__)
    yield started
    started.close()


@pytest.fixture
def group(warm: OpenWorkers, tmp_path: Path) -> Iterator[Group]:
    made = Group(warm, tmp_path / "store")
    yield made
    made.close()


@pytest.mark.parametrize(("leaver", "fan_out"), [("b", 1), ("c", 4)])
def test_a_worker_leaves_while_it_has_parts_to_run(group: Group, leaver: str, fan_out: int) -> None:
    group.join("a", "b", "c", "d")
    rows = 30
    group.begin("a", internals.map_as_one_leaves, leaver, ["b", "c", "d"], rows, fan_out)
    group.do(leaver, internals.leave_with_a_part)
    expected = [(2.0 * row) ** 2 + (2.0 * row + 1) ** 2 for row in range(rows)]
    assert group.result("a") == expected
