"""Trainers of a hybrid model with fewer batches than others: the others end, and name them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from tests.contract.processes.functions import stopped
from torchweft import rpc
from torchweft.embedding import SGD, Copies, RowWise, SparseAdam
from torchweft.errors import CallTimeout
from torchweft.hybrid import HybridModel, init_process_group
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2"]
LIMIT_S = 2.0
SLACK_S = 15.0


class Net(nn.Module):
    """Has a table, and a dense part with buffers."""

    def __init__(self, *, has_buffers: bool) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4) if has_buffers else nn.Identity()
        self.last = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.words(ids)))
        return found


def train(steps: int, ending: str, is_there: bool, has_buffers: bool) -> float:
    """Makes some steps; returns how long the last one took that failed, or 0."""
    init_process_group(TRAINERS)
    torch.manual_seed(0)
    place = RowWise(*SERVERS) if is_there else Copies()
    model = HybridModel(
        Net(has_buffers=has_buffers), SERVERS, places={"words": place}, timeout=LIMIT_S
    )
    rule = SGD(lr=0.1) if is_there else SparseAdam()
    optimizer = model.optimizer(rule, lambda dense: torch.optim.SGD(dense, lr=0.1))
    began_s = 0.0
    try:
        for _ in range(steps):
            began_s = time.monotonic()
            optimizer.zero_grad()
            model(torch.randint(50, (4, 3))).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    except CallTimeout as error:
        error.add_note(f"after {time.monotonic() - began_s:.1f} s")
        raise
    finally:
        if ending == "closes":
            model.close()
        else:
            _kept.append(model)
    return 0.0


_kept: list[object] = []


@pytest.mark.parametrize(
    ("fewer", "ending", "is_there", "has_buffers", "wait", "told"),
    [
        (1, "closes", True, False, "all-reduce of a backward pass", "which has closed the model"),
        (1, "goes on", True, False, "all-reduce of a backward pass", "which is 1 behind"),
        (1, "goes on", False, False, "all-reduce of a backward pass", "which is 1 behind"),
        (0, "goes on", True, True, "broadcast of buffers in a forward pass", "which is 1 behind"),
        (1, "stops", True, False, "all-reduce of a backward pass", "which does not answer"),
    ],
)
def test_a_trainer_with_a_batch_more_names_the_other(
    nursery: Nursery,
    fewer: int,
    ending: str,
    is_there: bool,
    has_buffers: bool,
    wait: str,
    told: str,
) -> None:
    with cluster(workers=3, nursery=nursery, check=False) as group:
        steps = [3, 3]
        steps[fewer] -= 1
        calls = [
            rpc.rpc_async(name, train, (steps[me], ending, is_there, has_buffers), timeout=60)
            for me, name in enumerate(TRAINERS)
        ]
        missing, present = calls[fewer], calls[1 - fewer]
        missing.wait()
        if ending == "stops":
            with stopped(group.pids[TRAINERS[fewer]]):
                error = raised_by(present)
        else:
            error = raised_by(present)
    assert error.worker == TRAINERS[fewer]
    assert f"the {wait} of hybrid model 'hybrid' has waited" in str(error)
    assert f"'{TRAINERS[fewer]}', {told}" in str(error)
    (note,) = [each for each in error.__notes__ if each.startswith("after ")]
    assert LIMIT_S <= float(note.split()[1]) < LIMIT_S + SLACK_S


def raised_by(call: rpc.Future[float]) -> CallTimeout:
    with pytest.raises(CallTimeout) as caught:
        call.wait()
    return caught.value
