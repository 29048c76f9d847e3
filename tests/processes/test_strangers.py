"""Strangers knock: each gets what the table says, and the members go on as if nothing were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.processes.open_workers import OpenWorkers
from tests.processes.stranger_groups import Group
from tests.processes.strangers import GONE, STRANGERS, Row, Victim, tls_rows


@pytest.fixture(scope="module")
def warm() -> Iterator[OpenWorkers]:
    started = OpenWorkers("tests.processes.strange_members")
    yield started
    started.close()


pytestmark = pytest.mark.keeps("threads", "descriptors", "processes")


@pytest.fixture(scope="module")
def group(warm: OpenWorkers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(warm, tmp_path_factory.mktemp("plain"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def victim(group: Group) -> Victim:
    return group.victim()


@pytest.mark.parametrize("row", STRANGERS, ids=lambda row: row.title)
def test_a_stranger(group: Group, victim: Victim, row: Row) -> None:
    got = group.suffer(row, victim)
    assert (got.said, got.hung_up) == (row.said, row.hung_up)
