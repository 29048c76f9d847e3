"""Meta-gradients equal those of a single process, even if workers are killed meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes import autograd_functions
from tests.contract.processes import meta_gradient_functions as functions
from tests.contract.processes.functions import options
from tests.contract.processes.meta_gradient_checks import (
    EXACT,
    by_map,
    check,
    difference,
    nothing_kept,
)
from tests.contract.processes.meta_gradient_functions import Death, Doom, Inner
from tests.thorough import CHECKED, spread
from torchweft import knobs, mapreduce, rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster, Nursery
from torchweft.mapreduce.observers import observers

WORKERS = FIRST, SECOND, THIRD = ("worker0", "worker1", "worker2")
ACROSS = 1e-10
"""Tolerance where the inner loop itself calls other workers."""

each_in_turn = mapreduce.dim_partitioner(0, exclusive=True, workers=WORKERS)
in_chunks = mapreduce.dim_partitioner(0, workers=WORKERS)
caller_and_one = mapreduce.dim_partitioner(0, exclusive=True, workers=("driver", FIRST))
only_one = mapreduce.dim_partitioner(0, exclusive=True, workers=(FIRST,))

WAYS = ("backward", "grad")
WAYS_AND_ORDERS = [("backward", True), ("grad", False)]

every_way = pytest.mark.parametrize("way", WAYS)

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


@contextlib.contextmanager
def three(nursery: Nursery, victims: Sequence[str] = ()) -> Iterator[Cluster]:
    """Three workers; checks that the survivors keep nothing."""
    with (
        torchweft.cluster(
            workers=3, nursery=nursery, rpc_backend_options=options(), check=False
        ) as group,
        nothing_kept(group, victims),
    ):
        yield group


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
    observers.add(losses)
    yield losses
    assert observers.remove(losses), "it has raised"


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
    ("point", "workers", "way"), spread(INNER_POINTS, [(None,), (WORKERS,)], WAYS, all_from=CHECKED)
)
def test_the_inner_loop_goes_on_with_those_who_are_left(
    nursery: Nursery, tmp_path: Path, workers: tuple[str, ...] | None, point: str, way: str
) -> None:
    doom = Doom(str(tmp_path), (Death(SECOND, point),))
    inner = Inner(workers, doom)
    with three(nursery, [SECOND]):
        outcome = by_map(way, functions.query_error_by_others, inner, partitioner=each_in_turn)
        assert doom.so_far() == 1
    check(outcome, True, ACROSS)


@pytest.mark.parametrize("point", ["begin", "backward", "gradient"])
def test_it_dies_before_gradients_of_gradients_are_computed(
    nursery: Nursery, tmp_path: Path, point: str
) -> None:
    model, seeds = functions.network(), torch.arange(8)
    leaves = list(model.parameters())
    whole = functions.mean_query_error(model, seeds, True)
    expected = torch.autograd.grad(
        penalized(whole, torch.autograd.grad(whole, leaves, create_graph=True)), leaves
    )
    doom = Doom(str(tmp_path), (Death(SECOND, point),))
    with three(nursery, [SECOND]):
        with torchweft.autograd.context() as context_id:
            error = mapreduce.remote_sync_call(
                functions.mean_query_error,
                args=(model, seeds, True, doom),
                partitioner=each_in_turn,
                reducer=mapreduce.mean_reducer,
            )
            slopes = mapreduce.autograd.grad(context_id, error, leaves, create_graph=True)
            assert doom.so_far() == 1
            found = mapreduce.autograd.grad(context_id, penalized(error, slopes), leaves)
        del error, slopes
    assert difference(found, expected) <= EXACT


def penalized(error: Tensor, slopes: Sequence[Tensor]) -> Tensor:
    return error + 0.1 * torch.stack([slope.square().sum() for slope in slopes]).sum()


@every_way
def test_nobody_is_left(nursery: Nursery, tmp_path: Path, way: str) -> None:
    doom = Doom(str(tmp_path), (Death(FIRST, "backward"),))
    model = functions.network()
    leaves = list(model.parameters())
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    with three(nursery, [FIRST]), torchweft.autograd.context() as context_id:
        error = mapreduce.remote_sync_call(
            functions.mean_query_error,
            args=(model, torch.arange(8), True, doom),
            partitioner=only_one,
            reducer=mapreduce.mean_reducer,
        )
        go_back: dict[str, Any] = {
            "backward": functools.partial(mapreduce.autograd.backward, context_id, error),
            "grad": functools.partial(mapreduce.autograd.grad, context_id, error, leaves),
        }
        with pytest.raises(WorkerLost, match="worker0") as caught:
            go_back[way]()
        assert "no worker is left" in str(vars(caught.value))
        del error, go_back
    assert all(leaf.grad is not None and bool((leaf.grad == 1).all()) for leaf in leaves)
