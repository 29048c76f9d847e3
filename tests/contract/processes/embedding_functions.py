"""What trainers of embedding tables run, and the same training in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft import autograd, rpc
from torchweft.embedding import (
    SGD,
    Adagrad,
    Copies,
    Jagged,
    Normal,
    Plan,
    RowWise,
    RowWiseAdagrad,
    Rule,
    SparseAdam,
    TableConfig,
    Tables,
    TablesOptimizer,
    Uniform,
    plan_tables,
    recover,
)

BATCH = 6
CONFIGS = (
    TableConfig("words", 40, 6, "sum", torch.float64, Normal(std=0.3)),
    TableConfig("users", 23, 6, "mean", torch.float64, Uniform(-0.3, 0.3), padding_idx=3),
    TableConfig("pages", 17, 6, "none", torch.float64, Normal(std=0.3), padding_idx=-1),
    TableConfig("tags", 11, 4, "max", torch.float64, Normal(std=0.3)),
    TableConfig("seen", 30, 4, "sum", torch.float64, Uniform()),
)
RULES: dict[str, Rule] = {
    "sgd": SGD(lr=0.05),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "row-wise": RowWiseAdagrad(lr=0.1),
    "adam": SparseAdam(lr=0.05),
}


class Batch(NamedTuple):
    """What one trainer looks up in one step."""

    inputs: dict[str, Any]
    weights: Tensor
    target: Tensor


def configs_of(dtype: torch.dtype) -> list[TableConfig]:
    return [
        TableConfig(
            each.name, each.rows, each.dim, each.pooling, dtype, each.initial, each.padding_idx
        )
        for each in CONFIGS
    ]


def skewed(count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Returns ids of which low ones are frequent, as words of a text are."""
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    return (rows**draws - 1).long().clamp_(max=rows - 1)


def draw_batch(trainer: int, step: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    inputs: dict[str, Any] = {}
    lengths = torch.randint(0, 9, (BATCH,), generator=generator)
    offsets = lengths.cumsum(0) - lengths
    count = int(lengths.sum())
    weights = torch.rand(count, generator=generator, dtype=torch.float64).to(dtype)
    inputs["words"] = Jagged(skewed(count, 40, generator), offsets, weights)
    inputs["users"] = skewed(4 * BATCH, 23, generator).view(BATCH, 4)
    if step % 3:  # A table that is not looked up in each step makes fewer steps.
        inputs["pages"] = skewed(BATCH, 17, generator).view(BATCH)
    inputs["tags"] = Jagged(skewed(count, 11, generator), offsets)
    inputs["seen"] = skewed(20 * BATCH, 30, generator).view(BATCH, 20)
    target = torch.randn(BATCH, generator=generator, dtype=torch.float64).to(dtype)
    return Batch(inputs, weights, target)


def outputs_loss(outputs: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """Returns a mean over samples, in which the parts of an output matter differently."""
    total = torch.zeros_like(target)
    for place, name in enumerate(sorted(outputs)):
        output = outputs[name]
        factors = torch.linspace(0.5, 1.5, output.shape[1], dtype=output.dtype)
        total = total + torch.tanh((output * factors).mean(1)) * (place + 1) / 10
    return functional.mse_loss(total, target)


def train(
    plan: Plan,
    trainers: Sequence[str],
    me: int,
    rule: str,
    steps: int,
    dtype: torch.dtype,
    way: str = "backward",
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], dict[int, int]]:
    """Trains on this worker; returns all tables, the losses, and the staleness."""
    tables = Tables(plan, trainers=trainers, **options)
    optimizer = tables.optimizer(RULES[rule])
    losses = []
    for step in range(steps):
        batch = draw_batch(me, step, dtype)
        losses.append(_step(tables, optimizer, batch, way))
    found = {each.name: tables.weights(each.name) for each in plan.configs}
    staleness = tables.staleness()
    tables.close()
    return found, losses, staleness


def _step(tables: Tables, optimizer: Any, batch: Batch, way: str) -> float:
    optimizer.zero_grad()
    if way == "context":
        with autograd.context() as context_id:
            loss = outputs_loss(tables(batch.inputs), batch.target)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.item()
    if way == "two calls":  # The gradients of two lookups of the same rows add up.
        for share in (0.25, 0.75):
            loss = outputs_loss(tables(batch.inputs), batch.target)
            (loss * share).backward()
    else:
        loss = outputs_loss(tables(batch.inputs), batch.target)
        autograd.backward(loss) if way == "outside" else loss.backward()
    optimizer.step()
    return loss.item()


class OneProcess:
    """The same tables as modules of PyTorch, with sparse gradients where there are such."""

    def __init__(self, configs: Sequence[TableConfig], weights: Mapping[str, Tensor]) -> None:
        self.modules = {each.name: _module(each, weights[each.name]) for each in configs}

    def outputs(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Looks up the joined batch."""
        names = dict.fromkeys(name for batch in batches for name in batch.inputs)
        return {
            name: torch.cat([_looked_up(self.modules[name], each.inputs[name]) for each in batches])
            for name in names
        }

    def train(self, rule: str, steps: int, trainers: int, dtype: torch.dtype) -> list[float]:
        optimizer = _local_optimizer(rule, [each.weight for each in self.modules.values()])
        losses = []
        for step in range(steps):
            batches = [draw_batch(trainer, step, dtype) for trainer in range(trainers)]
            target = torch.cat([batch.target for batch in batches])
            loss = outputs_loss(self.outputs(batches), target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            _make_sparse(self.modules["tags"], batches)
            optimizer.step()
            losses.append(loss.item())
        return losses


def _module(config: TableConfig, weights: Tensor) -> Any:
    options: dict[str, Any] = {"padding_idx": config.padding_idx, "_weight": weights.clone()}
    if config.pooling == "none":
        return nn.Embedding(config.rows, config.dim, sparse=True, **options)
    is_sparse = config.pooling != "max"
    return nn.EmbeddingBag(
        config.rows, config.dim, mode=config.pooling, sparse=is_sparse, **options
    )


def _make_sparse(module: Any, batches: Sequence[Batch]) -> None:
    """Gives a table that pools by maximum sparse gradients of all rows that were looked up.

    PyTorch has only dense ones for it, in which rows that are no maximum look like any other.
    """
    gradient = module.weight.grad
    if gradient is None or gradient.is_sparse:
        return
    rows = torch.cat([batch.inputs["tags"].ids for batch in batches]).unique()
    module.weight.grad = torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape)


def _looked_up(module: Any, given: Any) -> Tensor:
    found: Tensor
    if isinstance(given, Tensor):
        found = module(given)
    elif module.mode == "sum":
        found = module(given.ids, given.offsets, given.per_sample_weights)
    else:
        found = module(given.ids, given.offsets)
    return found


class LocalRowWise(torch.optim.Optimizer):
    """Row-wise Adagrad by its definition, on dense gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense()
                sums = self.state[parameter].setdefault("sum", parameter.new_zeros(len(parameter)))
                sums += gradient.square().mean(1)
                deviation = sums.sqrt() + 1e-10
                parameter -= group["lr"] * gradient / deviation[:, None]


def _local_optimizer(rule: str, parameters: list[Any]) -> torch.optim.Optimizer:
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    if rule == "adagrad":
        options = {"lr_decay": 0.01, "initial_accumulator_value": 0.1}
        return torch.optim.Adagrad(parameters, lr=0.1, **options)  # type: ignore[arg-type]
    if rule == "adam":
        return torch.optim.SparseAdam(parameters, lr=0.05)
    return LocalRowWise(parameters, lr=0.1)


# Functions for single scenarios

_kept: dict[str, tuple[Tables, TablesOptimizer]] = {}


def open_tables(plan: Plan, trainers: Sequence[str], rule: str, **options: Any) -> None:
    """Makes tables that stay open between calls of the test."""
    name = options.get("name", "tables")
    tables = Tables(plan, trainers=trainers, **options)
    _kept[name] = tables, tables.optimizer(RULES[rule])


def train_step(name: str, me: int, step: int, dtype: torch.dtype) -> float:
    """Makes one step with open tables."""
    return _step(*_kept[name], draw_batch(me, step, dtype), "backward")


def staleness_of(name: str) -> dict[int, int]:
    """Returns the staleness of open tables."""
    return _kept[name][0].staleness()


def close_tables(name: str) -> None:
    """Closes open tables."""
    tables, _ = _kept.pop(name)
    tables.close()


def end_process() -> None:
    """Ends this worker without a word to the others."""
    os._exit(7)


# Groups of trainers


def train_equal_rows(
    plan: Plan, trainers: Sequence[str], steps: int, **options: Any
) -> dict[str, Tensor]:
    """Trains on the same rows as all other trainers."""
    tables = Tables(plan, trainers=trainers, **options)
    optimizer = tables.optimizer(SGD(lr=0.1))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, plan.configs[0].rows, (600,), generator=generator)
        optimizer.zero_grad()
        tables({plan.configs[0].name: ids})[plan.configs[0].name].square().mean().backward()
        optimizer.step()
    found = {each.name: tables.weights(each.name) for each in plan.configs}
    tables.close()
    return found


# Bytes of a step


def counted_batch(config: TableConfig, trainer: int, step: int) -> Tensor:
    """Returns ids of which some are frequent: one each, or bags of a hundred."""
    generator = torch.Generator().manual_seed(31 * trainer + step)
    shape = (1500,) if config.pooling == "none" else (32, 100)
    draws = torch.rand(shape, generator=generator, dtype=torch.float64).pow(3)
    return (draws * config.rows).long()


def train_counted(plan: Plan, trainers: Sequence[str], me: int, steps: int, **options: Any) -> None:
    """Trains all tables of a plan; nothing but pulls and pushes is sent."""
    tables = Tables(plan, trainers=trainers, **options)
    optimizer = tables.optimizer(SGD(lr=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        outputs = tables({each.name: counted_batch(each, me, step) for each in plan.configs})
        sum(each.square().mean() for each in outputs.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    tables.close()


def train_tables_with_recovery(
    me: int, trainers: Sequence[str], servers: Sequence[str], directory: str, killed: str = ""
) -> tuple[dict[str, Tensor], list[int], int]:
    """Trains tables and a dense part by ``recover``; the first trainer kills a server in step 4.

    Returns:
        The tables and the dense part, the steps that were made, and how often it opened.
    """
    made: list[int] = []
    opened: list[Tables] = []

    def open_all() -> tuple[Any, ...]:
        configs = [
            TableConfig("words", 40, 6, "sum", torch.float64, Normal(std=0.3)),
            TableConfig("days", 7, 6, "sum", torch.float64, Normal(std=0.3)),
        ]
        places: dict[str, Any] = {"words": RowWise(*servers), "days": Copies()}
        tables = Tables(
            plan_tables(configs, servers, places=places),
            name="recovered",
            trainers=trainers,
            timeout=20,
        )
        opened.append(tables)
        dense = nn.Linear(6, 1, dtype=torch.float64)
        with torch.no_grad():  # Wrong values on one trainer, if the state is not taken over.
            dense.weight.fill_(0.5 + (me if len(opened) > 1 else 0))
            dense.bias.zero_()
        return tables, tables.optimizer(Adagrad(lr=0.1)), dense

    def step(number: int, tables: Tables, optimizer: TablesOptimizer, dense: nn.Linear) -> None:
        generator = torch.Generator().manual_seed(10 * number + me)
        ids = torch.randint(7, (5, 3), generator=generator)
        local = [*dense.parameters(), *tables.copies.parameters()]
        optimizer.zero_grad()
        out = tables({"words": 5 * ids, "days": ids})
        loss = (dense(out["words"] + out["days"]) - 1.0).square().mean()
        if number == 4 and len(opened) == 1 and me == 0 and killed:
            os.kill(rpc.rpc_sync(killed, os.getpid), signal.SIGKILL)
        gradients = torch.autograd.grad(loss, local, retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # The mean over trainers, by a collective of their own.
        found = rpc.all_gather([each.clone() for each in gradients], trainers, timeout=20)
        with torch.no_grad():
            for place, each in enumerate(local):
                each -= 0.1 * sum(found[name][place] for name in trainers) / len(trainers)
        made.append(number)

    tables, _, dense = recover(
        open_all,
        step,
        steps=8,
        directory=directory,
        every=3,
        state=lambda _tables, _optimizer, dense: {"dense": dense},
        patience_s=30.0,
    )
    state = {name: tables.weights(name) for name in ("words", "days")}
    state |= {name: each.detach().clone() for name, each in dense.state_dict().items()}
    rpc.barrier(trainers, timeout=30)
    tables.close()
    return state, made, len(opened)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 0.0) -> None:
    """Checks tables by name."""
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert float((values - expected[name]).abs().max()) <= bound, name
