"""Embedding tables on servers that are strict workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests import dynamic_ids
from tests.contract.processes.embedding_functions import configs_of, train
from tests.contract.processes.functions import options
from tests.contract.processes.hybrid_functions import draw, loss_of, make_net
from torchweft import checkpoint, embedding, hybrid
from torchweft.embedding import (
    SGD,
    RowWise,
    TableWise,
    plan_tables,
)
from torchweft.hybrid import HybridModel
from torchweft.launch import Nursery

pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
SERVERS = ["worker0", "worker1"]
ME = "driver"


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    strict = options(
        strict=True,
        callables=(*embedding.CALLABLES, *hybrid.CALLABLES, *checkpoint.CALLABLES),  # type: ignore[arg-type]
    )
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict):
        yield


def test_training_is_that_of_tables_on_the_trainer_itself() -> None:
    found = {}
    for servers in (SERVERS, [ME]):
        plan = plan_tables(configs_of(torch.float64), servers, trainers=1)
        found[len(servers)] = train(plan, [ME], 0, "adam", 3, torch.float64)
    (weights, losses, staleness), (expected, expected_losses, _) = found[2], found[1]
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    assert staleness == {0: 6}
    for name, values in weights.items():
        assert float((values - expected[name]).abs().max()) < 1e-12, name


def test_dynamic_ids_and_snapshots(tmp_path: Any) -> None:
    plan = plan_tables(dynamic_ids.CONFIGS, SERVERS, trainers=1)
    dynamic_ids.open_dynamic(plan, embedding.SparseAdam(lr=0.05), trainers=[ME])
    losses = [dynamic_ids.step_dynamic("tables", 0, 0)]
    dynamic_ids.save_dynamic("tables", str(tmp_path), 0)
    losses += [dynamic_ids.step_dynamic("tables", 0, step) for step in (1, 2)]
    dynamic_ids.save_dynamic("tables", str(tmp_path), 2, since=0)
    after = dynamic_ids.step_dynamic("tables", 0, 3)
    assert dynamic_ids.restore_dynamic("tables", str(tmp_path)) == 2
    dynamic_ids.reshard_dynamic("tables", plan_tables(dynamic_ids.CONFIGS, SERVERS[:1]))
    assert dynamic_ids.step_dynamic("tables", 0, 3) == after != losses[-1]
    dynamic_ids.close_dynamic("tables")


def test_a_hybrid_model_trains_and_clips_on_strict_servers(tmp_path: Any) -> None:
    found = []
    for servers in (SERVERS, [ME]):
        places = {"words": RowWise(*servers), "tower.users": TableWise(servers[0])}
        model = HybridModel(make_net(0), servers, places=places)
        optimizer = model.optimizer(SGD(0.1), functools.partial(torch.optim.SGD, lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, draw(0, step)).backward()  # type: ignore[no-untyped-call]
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        model.save(tmp_path, step=2)
        found.append(model.full_state_dict())
        model.close()
    for name, values in found[0].items():
        assert float((values - found[1][name]).abs().max()) < 1e-12, name
