"""Hybrid models with two trainers and two servers, compared with one process on joined batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.processes.ddp_functions import join_all
from tests.contract.processes.hybrid_functions import DENSE, RULES, STEPS, train, train_alone
from torchweft import checkpoint, rpc
from torchweft.embedding import ColumnWise, Copies, RowWise, TableWise
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.hybrid import HybridModel
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
]
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
TABLES = ["words", "tower.users", "days"]
Trained = tuple[dict[str, Tensor], list[float], str]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(workers=4, nursery=nursery):
        join_all(TRAINERS, tmp_path_factory.mktemp("gloo"))
        yield


def train_all(rule: str, dense: str = "sgd", dtype: Any = torch.float64, **options: Any) -> Any:
    steps = options.pop("steps", STEPS)
    servers = options.pop("servers", SERVERS)
    futures = [
        rpc.rpc_async(
            name, train, args=(number, rule, dense, steps, dtype, servers), kwargs=options
        )
        for number, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]


def check_equal(trained: list[Trained], expected: dict[str, Tensor], bound: float) -> None:
    for state, _, _ in trained:
        assert state.keys() == expected.keys()
        for name, values in expected.items():
            assert float((state[name] - values).abs().max()) <= bound, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rule", "dense"), [("sgd", "sgd"), ("adagrad", "adam"), ("row-wise", "sgd"), ("adam", "adam")]
)
def test_two_trainers_and_two_servers_equal_one_process(
    rule: str, dense: str, dtype: torch.dtype
) -> None:
    trained = train_all(rule, dense, dtype)
    expected, losses = train_alone(rule, dense, STEPS, dtype)
    check_equal(trained, expected, BOUNDS[dtype])
    means = torch.tensor([own for _, own, _ in trained]).mean(0)
    assert means.tolist() == pytest.approx(losses, abs=1e-6)


def test_sparse_tables_go_to_servers_and_dense_ones_to_the_replicas() -> None:
    (_, _, plan), (_, _, same) = train_all("sgd", steps=1)
    assert plan == same
    lines = {line.split()[0]: line for line in plan.splitlines()[1:]}
    assert "worker2, worker3" in lines["words.weight"]
    assert "sparse: " in lines["words.weight"]
    assert "replicas" in lines["days.weight"]
    assert "dense: " in lines["days.weight"]
    assert lines["6"].split()[1:3] == ["others", "replicas"]


@pytest.mark.parametrize("rule", ["momentum", "adagrad", "row-wise", "adam"])
def test_the_placement_does_not_change_the_result(rule: str) -> None:
    everywhere = {name: RowWise(*SERVERS) for name in TABLES}
    trained = train_all(rule, places=everywhere)
    for places in [
        {name: Copies() for name in TABLES},
        {"words": Copies(), "days": TableWise("worker3")},
        {"tower.users": TableWise("worker0"), "days": TableWise("worker3")},
    ]:
        check_equal(train_all(rule, places=places), trained[0][0], 1e-12)


class Shared(nn.Module):
    """Has one table at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.side = nn.Sequential(self.words, nn.Linear(4, 2))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.side(ids) + self.words(ids).sum() / self.words.embedding_dim
        return found


def test_the_full_state_is_that_of_the_module_with_a_table_at_two_places() -> None:
    module = Shared()
    expected = {name: each.clone() for name, each in module.state_dict().items()}
    model = HybridModel(module, SERVERS, name="shared")
    found = model.full_state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert model(torch.tensor([1, 2])).shape == (2, 2)
    model.close()


def test_zero_grad_of_the_model_drops_gradients_of_rows_as_well() -> None:
    module = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 1))
    model = HybridModel(module, SERVERS, name="dropped", places={"0": RowWise(*SERVERS)})
    optimizer = model.optimizer(RULES["sgd"], DENSE["sgd"])
    before = {name: each.clone() for name, each in model.full_state_dict().items()}
    model(torch.tensor([[0, 1]])).sum().backward()
    model.zero_grad()
    optimizer.step()
    found = model.full_state_dict()
    assert all(torch.equal(found[name], each) for name, each in before.items())
    with pytest.raises(ConfigurationError, match="rows of '0' are on servers"):
        module[0].requires_grad_(False)
    assert module[0].requires_grad_() is module[0]
    model.close()


def test_a_snapshot_that_would_lack_the_rows_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 1))
    model = HybridModel(module, SERVERS, name="saved", places={"0": RowWise(*SERVERS)})
    alone = nn.Sequential(model.tables, nn.Linear(4, 1))
    for each in (model, module, alone):
        with pytest.raises(ArgumentTypeError, match=r"model is a .*lacks the rows on worker2, wo"):
            checkpoint.save(tmp_path, {"model": each}, step=1)
    model.save(tmp_path, step=1, state={"alone": alone})
    model.restore(tmp_path, state={"alone": alone})
    with pytest.raises(ArgumentTypeError, match="by HybridModel"):
        checkpoint.restore(tmp_path, {"model": module})
    model.close()
    checkpoint.save(tmp_path, {"rest": module}, step=2)


def test_no_server_is_needed_if_all_tables_are_copies() -> None:
    trained = train_all("adam", servers=[], places={name: Copies() for name in TABLES})
    check_equal(trained, train_alone("adam", "sgd", STEPS, torch.float64)[0], 1e-12)


def test_columns_of_a_table_are_put_together_again() -> None:
    trained = train_all("adam", places={"words": ColumnWise(*SERVERS)})
    check_equal(trained, train_alone("adam", "sgd", STEPS, torch.float64)[0], 1e-12)


def test_schedulers_change_the_learning_rates_of_both_parts() -> None:
    trained = train_all("adagrad", "adam", schedules=True)
    expected, _ = train_alone("adagrad", "adam", STEPS, torch.float64, schedules=True)
    check_equal(trained, expected, 1e-12)


def test_passes_without_sync_add_up_in_both_parts() -> None:
    trained = train_all("adagrad", passes=3)
    expected, _ = train_alone("adagrad", "sgd", STEPS, torch.float64, passes=3)
    check_equal(trained, expected, 1e-12)


def test_parameters_that_are_not_used_may_be_there() -> None:
    for uses_spare in (False, True):
        trained = train_all("sgd", uses_spare=uses_spare)
        expected, _ = train_alone("sgd", "sgd", STEPS, torch.float64, uses_spare=uses_spare)
        check_equal(trained, expected, 1e-12)


def test_several_modules_under_ddp() -> None:
    replicas = ["tower", "days", "spare", "head"]
    trained = train_all("adagrad", passes=2, uses_spare=True, replicas=replicas)
    expected, _ = train_alone("adagrad", "sgd", STEPS, torch.float64, passes=2, uses_spare=True)
    check_equal(trained, expected, 1e-12)


def test_passes_in_contexts_train_as_those_outside() -> None:
    for options in ({}, {"max_norm": 0.5}):
        expected = train_all("adagrad", **options)
        found = train_all("adagrad", way="context", **options)
        check_equal(found, expected[0][0], 1e-14)
        assert found[0][1] == pytest.approx(expected[0][1], rel=1e-12)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.4, 100.0])
def test_clipping_is_that_of_one_process(max_norm: float, norm_type: float) -> None:
    options = {"max_norm": max_norm, "norm_type": norm_type}
    trained = train_all("adagrad", **options)
    expected, norms = train_alone("adagrad", "sgd", STEPS, torch.float64, **options)
    check_equal(trained, expected, 1e-12)
    for _, found, _ in trained:
        assert found == pytest.approx(norms, rel=1e-12)
    assert trained[0][1] == trained[1][1]
    assert any(each > max_norm for each in norms) == (max_norm < 1)
