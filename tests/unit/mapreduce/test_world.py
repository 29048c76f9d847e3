"""The place of a worker in its group, and functions that run on some workers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.registration import HOST
from torchweft.engine.worker import current
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce import world
from torchweft.mapreduce.world import (
    not_on_rank,
    on_rank,
    rank_all,
    rank_non_zero_only,
    rank_zero_only,
)

NAMES_OF_TORCHOPT = """auto_init_rpc barrier default_worker_name_format get_local_rank
get_local_world_size get_rank get_worker_id get_world_info get_world_rank get_world_size not_on_rank
on_rank rank_all rank_non_zero_only rank_zero_only WorldInfo""".split()


def test_the_names_are_those_of_torchopt() -> None:
    assert sorted(world.__all__) == sorted(NAMES_OF_TORCHOPT)


# The place

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
def test_the_rank_of_a_worker_by_its_name() -> None:
    assert world.get_worker_id() == world.get_worker_id(id=None) == 2
    assert world.get_worker_id("worker3") == 3
    assert world.get_worker_id(WorkerInfo("worker1", 1)) == 1
    assert world.get_worker_id(77) == 77  # unchanged
    with pytest.raises(UnknownWorker, match=r"'nobody'.*worker0"):
        world.get_worker_id("nobody")


def test_a_launcher_with_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PLACE:
        monkeypatch.delenv(variable, raising=False)
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    for variable, value in zip(names + local_names, "3512", strict=True):
        monkeypatch.setenv(variable, value)
    assert world.get_world_info() == asked_one_by_one() == (3, 5, 1, 2)


# Functions that run on some of the workers

SIZE = 4


def add(first: int, second: int = 1) -> int:
    """Adds."""
    return first + second


def ranks_that_run(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    results = {}
    for rank in range(SIZE):
        monkeypatch.setenv("RANK", str(rank))
        results[rank] = function(3, second=4)
    assert set(results.values()) <= {7, None}
    return [rank for rank, result in results.items() if result == 7]


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        (on_rank(1), [1]),
        (on_rank(1, 3, 9), [1, 3]),
        (on_rank(), []),
        (on_rank(np.int64(2)), [2]),
        (not_on_rank(1), [0, 2, 3]),
        (not_on_rank(1, 3, 9), [0, 2]),
        (not_on_rank(), [0, 1, 2, 3]),
        (rank_all, [0, 1, 2, 3]),
        (rank_zero_only, [0]),
        (rank_non_zero_only, [1, 2, 3]),
    ],
)
def test_who_runs_it_is_found_out_when_it_is_called(
    decorator: Callable[..., Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = decorator(add)
    assert (function.__name__, function.__doc__) == ("add", "Adds.")
    assert ranks_that_run(function, monkeypatch) == expected


@pytest.mark.parametrize("decorator", [on_rank, not_on_rank])
@pytest.mark.parametrize("rank", [add, "0", 1.0, None, range(2), [0]])
def test_what_is_no_rank_is_refused(decorator: Callable[..., Any], rank: object) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{decorator.__name__} takes ranks") as caught:
        decorator(0, rank)
    assert isinstance(caught.value, TypeError)
    assert (f"write @{decorator.__name__}(0)" in str(caught.value)) == callable(rank)
