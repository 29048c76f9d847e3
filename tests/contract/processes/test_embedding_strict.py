"""Embedding tables on servers that are strict workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests import dynamic_ids
from tests.contract.processes import functions
from tests.contract.processes.embedding_functions import configs_of, train
from tests.contract.processes.functions import options
from tests.contract.processes.hybrid_functions import draw, loss_of, make_net
from torchweft import checkpoint, embedding, hybrid, rpc
from torchweft.embedding import (
    SGD,
    IdOutOfRange,
    InputError,
    RowWise,
    Tables,
    TableWise,
    host,
    plan_tables,
)
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotAllowed
from torchweft.hybrid import HybridModel
from torchweft.hybrid.clipping import measure
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


def test_what_servers_are_sent_is_checked() -> None:
    tables = Tables(plan_tables(configs_of(torch.float64), SERVERS, trainers=1), trainers=[ME])
    tables.optimizer(SGD())
    everywhere = torch.tensor([0, 1 << 30])
    with pytest.raises(IdOutOfRange, match="asked for row 1073741824"):
        rpc.rpc_sync("worker0", host.pull, ("tables", -1, 0, [(0, everywhere)]))
    for pushes in ([(0, 1, [(everywhere, torch.zeros(2, 6))])], [(0, 1, [(everywhere[:1],) * 2])]):
        with pytest.raises((IdOutOfRange, InputError)):
            rpc.rpc_sync("worker0", host.push, ("tables", 0, 0, 0.1, 0, pushes))
    for function, args in (
        (host.set_up, ("others", {"layout": ()})),
        (host.set_rule, ("tables", "adam")),
        (host.push, ("tables", 0, 0, "fast", 0, [])),
        (host.pull, (b"tables", 0, 0, [])),
    ):
        with pytest.raises(ArgumentTypeError, match="of a call of Weft's own"):
            rpc.rpc_sync("worker0", function, args)
    other = rpc.RRef(tables)
    with pytest.raises(ArgumentTypeError, match="entry of a call"):
        embedding.saved.taken(other, (0, 1, 1), (0, 1, 1), 1)  # type: ignore[arg-type]
    tables.close()


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


def test_gradients_whose_norm_is_measured_are_checked() -> None:
    plan = plan_tables(configs_of(torch.float64), SERVERS, trainers=1)
    tables = Tables(plan, name="measured", trainers=[ME])
    key = "measured", "token", 1
    beyond = {0: [(torch.tensor([1 << 30]), torch.zeros(1, 6, dtype=torch.float64))]}
    for given, error in (
        ((key, 0, 2.0, True, beyond), IdOutOfRange),
        ((key, 0, 2.0, True, {0: [(torch.tensor([0]), torch.zeros(1, 5))]}), InputError),
        ((key, 0, 2.0, True, {9: []}), InputError),
        ((key, 1, 2.0, True, {}), ConfigurationError),
        ((("others", "token", 1), 0, 2.0, True, {}), ConfigurationError),
        (("measured", 0, 2.0, True, {}), ArgumentTypeError),
        ((key, 0, "2", True, {}), ArgumentTypeError),
    ):
        with pytest.raises(error):
            rpc.rpc_sync("worker0", measure, given)
    given = {0: [(torch.tensor([0]), torch.ones(1, 6, dtype=torch.float64))]}
    found = rpc.rpc_sync("worker0", measure, (key, 0, 2.0, True, given))
    assert float(found) == pytest.approx(6**0.5)
    tables.close()


def test_anything_else_is_refused() -> None:
    for function in (functions.identity, host.host_of, embedding.fit_step_cost):
        with pytest.raises(NotAllowed, match="not registered"):
            rpc.rpc_sync("worker0", function, (1,))
