"""Maps in open groups: workers join, leave, die and return between maps and during them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes import mapreduce_functions_u as functions
from tests.open_workers import OpenWorkers, WarmProcess

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, functions.__name__)
    yield started
    started.close()


class Group:
    """An open group for one test: workers ``a``, ``b`` and so on, of rank 0, 1 and so on."""

    def __init__(self, warm: OpenWorkers, path: Path) -> None:
        self._method = f"file://{path}"
        self.workers = warm
        self.do, self.begin, self.result = warm.do, warm.begin, warm.result
        self.names: set[str] = set()

    def join(self, *names: str) -> None:
        for name in names:
            self.names.add(name)
            self.do(name, functions.join, name, ord(name) - ord("a"), self._method)

    def kill(self, name: str) -> None:
        self.workers.kill(name)
        self.names.discard(name)

    def close(self) -> None:
        for name in self.names:
            self.workers.kill(name)


@pytest.fixture
def group(warm: OpenWorkers, tmp_path: Path) -> Iterator[Group]:
    made = Group(warm, tmp_path / "store")
    yield made
    made.close()


def test_who_joins_between_maps_gets_parts(group: Group) -> None:
    group.join("a")
    assert group.do("a", functions.lives, 2) == [("a", 1), ("a", 2)]
    group.join("b", "c")
    assert group.do("a", functions.lives, 4) == [("a", 3), ("b", 1), ("c", 1), ("a", 4)]
    assert group.do("c", functions.lives, 2) == [("a", 5), ("b", 2)]


def test_who_leaves_between_maps_gets_none(group: Group) -> None:
    group.join("a", "b", "c")
    group.do("a", functions.lives, 3)
    group.do("b", functions.leave)
    assert group.do("a", functions.lives, 3) == [("a", 2), ("c", 2), ("a", 3)]


@pytest.mark.parametrize("is_known", [True, False])
def test_who_was_killed_and_came_back_under_its_name_gets_parts(
    group: Group, is_known: bool
) -> None:
    """With ``is_known`` the caller learns of the death first, otherwise of the new life."""
    group.join("a", "b")
    assert group.do("a", functions.lives, 2, ["b"]) == [("b", 1), ("b", 2)]
    group.kill("b")
    if is_known:
        group.do("a", functions.know, "a")
    group.join("b")
    assert group.do("a", functions.lives, 2, ["b"]) == [("b", 1), ("b", 2)]
    assert group.do("a", functions.lives, 3) == [("a", 1), ("b", 3), ("a", 2)]


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("names", [None, ["b", "c"]])
def test_a_worker_dies_before_the_backward_pass_and_may_come_back(
    group: Group, names: list[str] | None, comes_back: bool
) -> None:
    group.join("a", "b", "c")
    group.do("a", functions.forward, names, 7)
    group.kill("b")
    if comes_back:
        group.join("b")
    assert group.do("a", functions.backward) < TOLERANCE
    if comes_back:
        group.do("a", functions.forward, ["b"], 3)
        assert group.do("a", functions.backward) < TOLERANCE, "the new life is as good as any"


def test_all_workers_of_a_map_die_and_come_back(group: Group) -> None:
    """The map's other workers are gone; the caller, which took part in it, runs all parts."""
    group.join("a", "b", "c")
    group.do("a", functions.forward, None, 7)
    for name in "bc":
        group.kill(name)
        group.join(name)
    assert group.do("a", functions.backward) < TOLERANCE


def test_a_worker_leaves_before_the_backward_pass(group: Group) -> None:
    group.join("a", "b", "c")
    group.do("a", functions.forward, None, 7)
    group.do("b", functions.leave)
    assert group.do("a", functions.backward) < TOLERANCE


def test_maps_go_on_while_workers_leave(group: Group) -> None:
    group.join("a", "b", "c", "d")
    group.begin("a", functions.maps_until_others_left, "a", "d")
    for leaver in "bc":
        group.do("d", functions.wait_for_maps, 3)
        group.do(leaver, functions.leave)
    assert group.result("a") >= 6
