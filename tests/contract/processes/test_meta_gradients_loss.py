"""Meta-gradients equal those of a single process, even if workers are killed meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes import meta_gradient_functions as functions
from tests.contract.processes.functions import options
from tests.contract.processes.meta_gradient_checks import (
    EXACT,
    difference,
    nothing_kept,
)
from tests.contract.processes.meta_gradient_functions import Death, Doom
from torchweft import mapreduce
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster, Nursery

WORKERS = FIRST, SECOND, THIRD = ("worker0", "worker1", "worker2")
each_in_turn = mapreduce.dim_partitioner(0, exclusive=True, workers=WORKERS)
only_one = mapreduce.dim_partitioner(0, exclusive=True, workers=(FIRST,))

WAYS = ("backward", "grad")
every_way = pytest.mark.parametrize("way", WAYS)


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
