from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.registration import HOST
from torchweft.engine.worker import current
from torchweft.errors import ConfigurationError, NotInitialized, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce import world
from torchweft.mapreduce.world import WorldInfo

PLACE = {"RANK": "3", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*PLACE, "WEFT_WORKER_NAME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in PLACE.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    """Makes four workers; this process is worker2, and worker0 is on another host."""
    with group_of(4) as group:
        for member in group:
            for peer in member.agent.peers.values():
                peer.registration.facts[HOST] = "far" if peer.info.id == 0 else "here"
        monkeypatch.setattr(current, "here", group[2].agent)
        yield group


def asked_one_by_one() -> tuple[int, int, int, int]:
    return (
        world.get_world_rank(),
        world.get_world_size(),
        world.get_local_rank(),
        world.get_local_world_size(),
    )


def test_without_a_launcher_a_process_is_alone() -> None:
    assert world.get_world_info() == asked_one_by_one() == (0, 1, 0, 1)
    assert world.get_world_info().worker_name == "worker0"


@pytest.mark.usefixtures("launched")
def test_what_a_launcher_says_counts_from_when_it_says_so() -> None:
    info = world.get_world_info()
    assert info == asked_one_by_one() == (3, 12, 1, 2)
    assert (info.rank, info.worker_name) == (3, "worker03")


def test_rank_has_two_names() -> None:
    assert world.get_rank is world.get_world_rank


@pytest.mark.usefixtures("launched")
def test_the_name_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_WORKER_NAME", "trainer")
    assert world.get_world_info().worker_name == "trainer"


@pytest.mark.parametrize("variable", PLACE)
@pytest.mark.parametrize("value", ["", "two", "-1", "1.0"])
@pytest.mark.usefixtures("launched")
def test_what_is_no_number_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{variable} is {value!r}, which is no number"):
        world.get_world_info()


@pytest.mark.usefixtures("members", "launched")
def test_a_worker_goes_by_its_group() -> None:
    info = world.get_world_info()
    assert info == asked_one_by_one() == (2, 4, 1, 3)
    assert info.worker_name == "worker2"
    assert info._replace(world_rank=1).worker_name == "worker1"
    with pytest.raises(UnknownWorker, match="worker3"):
        _ = info._replace(world_rank=4).worker_name


@pytest.mark.usefixtures("members")
def test_a_launcher_knows_which_worker_of_its_group_is_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for variable, value in places.items():
        monkeypatch.setenv(variable, value)
    assert world.get_world_info() == asked_one_by_one() == (2, 4, 0, 2)


@pytest.mark.usefixtures("members")
def test_the_rank_of_a_worker_by_its_name() -> None:
    assert world.get_worker_id() == world.get_worker_id(id=None) == 2
    assert world.get_worker_id("worker3") == 3
    assert world.get_worker_id(WorkerInfo("worker1", 1)) == 1
    assert world.get_worker_id(77) == 77  # unchanged
    with pytest.raises(UnknownWorker, match=r"'nobody'.*worker0"):
        world.get_worker_id("nobody")


@pytest.mark.usefixtures("launched")
def test_names_mean_nothing_without_a_group() -> None:
    assert world.get_worker_id() == 3
    assert world.get_worker_id(5) == 5
    with pytest.raises(NotInitialized):
        world.get_worker_id("worker0")


def test_a_launcher_with_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PLACE:
        monkeypatch.delenv(variable, raising=False)
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    for variable, value in zip(names + local_names, "3512", strict=True):
        monkeypatch.setenv(variable, value)
    assert world.get_world_info() == asked_one_by_one() == (3, 5, 1, 2)


def test_default_names_sort_by_rank() -> None:
    names = [world.default_worker_name_format(rank, 12, 0, 1) for rank in range(12)]
    assert names == sorted(names)
    assert names[3] == world.default_worker_name_format(*WorldInfo(3, 12, 0, 1)) == "worker03"
