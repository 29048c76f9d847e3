"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

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
    WORKERS,
    each_in_turn,
    three,
)
from tests.thorough import spread
from torchweft import knobs, mapreduce
from torchweft.launch import Nursery
from torchweft.mapreduce.observers import watching

in_chunks = mapreduce.dim_partitioner(0, workers=WORKERS)

caller_and_one = mapreduce.dim_partitioner(0, exclusive=True, workers=("driver", FIRST))

WAYS_AND_ORDERS = [("backward", True), ("grad", False)]

# For each case: the deaths in order, by worker and point; FAN_OUT; the partitioner.
CASES: dict[str, tuple[tuple[tuple[str, str], ...], int, Any]] = {
    "a part begins": (((SECOND, "begin"),), 4, each_in_turn),
    "a part of many tasks ends": (((THIRD, "end"),), 4, in_chunks),
    "the last gradient is made": (((SECOND, "gradient"),), 4, each_in_turn),
    "top of the tree, in a part": (((FIRST, "begin"),), 1, each_in_turn),
    "middle of the tree, backward": (((SECOND, "gradient"),), 1, in_chunks),
    "two in parts": (((SECOND, "begin"), (THIRD, "begin")), 4, each_in_turn),
    "in a part, then backward": (((FIRST, "end"), (THIRD, "backward")), 1, each_in_turn),
    "backward, then in a part": (((FIRST, "backward"), (THIRD, "begin")), 4, each_in_turn),
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
