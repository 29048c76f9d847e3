"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.contract.processes import autograd_functions
from tests.contract.processes import meta_gradient_functions as functions
from tests.contract.processes.meta_gradient_checks import (
    by_map,
    check,
)
from tests.contract.processes.meta_gradient_functions import Death, Doom
from tests.contract.processes.test_meta_gradients_loss import (
    FIRST,
    SECOND,
    THIRD,
    WAYS,
    WORKERS,
    each_in_turn,
    three,
)
from tests.processes import meta_gradient_internals as internals
from tests.processes.meta_gradient_internals import Inner
from tests.thorough import spread
from torchweft import knobs, mapreduce, rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery
from torchweft.mapreduce.observers import watching

ACROSS = 1e-10
"""Tolerance where the inner loop itself calls other workers."""

in_chunks = mapreduce.dim_partitioner(0, workers=WORKERS)

caller_and_one = mapreduce.dim_partitioner(0, exclusive=True, workers=("driver", FIRST))

WAYS_AND_ORDERS = [("backward", True), ("grad", False)]

# For each case: the deaths in order, by worker and point; FAN_OUT; the partitioner.
CASES: dict[str, tuple[tuple[tuple[str, str], ...], int, Any]] = {
    "a part begins": (((SECOND, "begin"),), 4, each_in_turn),
    "a part ends": (((SECOND, "end"),), 4, each_in_turn),
    "a part of many tasks ends": (((THIRD, "end"),), 4, in_chunks),
    "the first gradient comes": (((FIRST, "backward"),), 4, each_in_turn),
    "the last gradient is made": (((SECOND, "gradient"),), 4, each_in_turn),
    "top of the tree, in a part": (((FIRST, "begin"),), 1, each_in_turn),
    "middle of the tree, in a part": (((SECOND, "end"),), 1, each_in_turn),
    "top of the tree, backward": (((FIRST, "backward"),), 1, each_in_turn),
    "middle of the tree, backward": (((SECOND, "gradient"),), 1, in_chunks),
    "end of the tree, backward": (((THIRD, "backward"),), 1, each_in_turn),
    "two in parts": (((SECOND, "begin"), (THIRD, "begin")), 4, each_in_turn),
    "two backward": (((SECOND, "backward"), (THIRD, "gradient")), 4, each_in_turn),
    "in a part, then backward": (((FIRST, "end"), (THIRD, "backward")), 1, each_in_turn),
    "backward, then in a part": (((FIRST, "backward"), (THIRD, "begin")), 4, each_in_turn),
    "all but one": (((FIRST, "begin"), (SECOND, "gradient")), 1, in_chunks),
    "all but the caller, in a part": (((FIRST, "end"),), 4, caller_and_one),
    "all but the caller, backward": (((FIRST, "gradient"),), 4, caller_and_one),
}


class Losses:
    """Records the parts that ran again, for each lost worker."""

    def __init__(self) -> None:
        self.parts: dict[str, set[int]] = {}

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        self.parts.setdefault(worker, set()).update(parts)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def losses() -> Iterator[Losses]:
    losses = Losses()
    watching.append(losses)
    yield losses
    watching.remove(losses)


@pytest.mark.parametrize(("case", "way", "is_second_order"), spread([*CASES], WAYS_AND_ORDERS))
def test_it_dies_by_itself(
    nursery: Nursery, tmp_path: Path, losses: Losses, case: str, is_second_order: bool, way: str
) -> None:
    deaths, fan_out, partitioner = CASES[case]
    doom = Doom(str(tmp_path), tuple(Death(*death) for death in deaths))
    victims = [worker for worker, _ in deaths]
    with three(nursery, victims), knobs.FAN_OUT.override(fan_out):
        outcome = by_map(
            way, functions.mean_query_error, is_second_order, doom, partitioner=partitioner
        )
        assert doom.so_far() == len(deaths), "not everybody has died who was to"
    check(outcome, is_second_order)
    assert set(losses.parts) == set(victims)
    assert all(losses.parts.values())


@pytest.mark.parametrize(("fan_out", "way", "is_second_order"), spread([1, 4], WAYS_AND_ORDERS))
def test_it_dies_between_both_passes(
    nursery: Nursery, losses: Losses, fan_out: int, is_second_order: bool, way: str
) -> None:
    def kill(_: Tensor) -> None:
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(FIRST, autograd_functions.die)

    with three(nursery, [FIRST]), knobs.FAN_OUT.override(fan_out):
        outcome = by_map(
            way,
            functions.mean_query_error,
            is_second_order,
            partitioner=each_in_turn,
            before_backward=kill,
        )
    check(outcome, is_second_order)
    assert {0, 3, 6} <= losses.parts[FIRST]


def hook(tensor: Tensor, function: Callable[[Tensor], None]) -> None:
    tensor.register_hook(function)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("way", "is_second_order"), WAYS_AND_ORDERS)
def test_it_dies_before_gradients_are_sent_to_it(
    nursery: Nursery, losses: Losses, is_second_order: bool, way: str
) -> None:
    with three(nursery, [FIRST]) as group:
        pids = [group.pids[FIRST]]

        def kill(_: Tensor) -> None:
            if pids:  # A repeated pass calls the hook again.
                os.kill(pids.pop(), signal.SIGKILL)

        outcome = by_map(
            way,
            functions.mean_query_error,
            is_second_order,
            partitioner=each_in_turn,
            before_backward=lambda error: hook(error, kill),
        )
    check(outcome, is_second_order)
    assert {0, 3, 6} <= losses.parts[FIRST]


# Inner loops that are maps themselves: over all workers, or over all but the caller.
INNER_POINTS = ("begin", "inner begin", "inner backward", "backward")


@pytest.mark.parametrize(
    ("point", "workers", "way"), spread(INNER_POINTS, [(None,), (WORKERS,)], WAYS)
)
def test_the_inner_loop_goes_on_with_those_who_are_left(
    nursery: Nursery, tmp_path: Path, workers: tuple[str, ...] | None, point: str, way: str
) -> None:
    doom = Doom(str(tmp_path), (Death(SECOND, point),))
    inner = Inner(workers, doom)
    with three(nursery, [SECOND]):
        outcome = by_map(way, internals.query_error_by_others, inner, partitioner=each_in_turn)
        assert doom.so_far() == 1
    check(outcome, True, ACROSS)
