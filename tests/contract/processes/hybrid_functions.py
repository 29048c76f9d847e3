"""What trainers of a hybrid model run, and the same training in one process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional

from tests.contract.processes.embedding_functions import LocalRowWise
from torchweft import autograd, rpc
from torchweft.embedding import (
    SGD,
    Adagrad,
    RowWise,
    RowWiseAdagrad,
    Rule,
    SparseAdam,
    TableWise,
)
from torchweft.errors import WorkerLost
from torchweft.hybrid import HybridModel, HybridOptimizer, init_process_group

WORDS, USERS, DAYS = 40, 23, 5
BATCH = 6
STEPS = 8
Batch = tuple[Tensor, Tensor, Tensor]

RULES: dict[str, Rule] = {
    "sgd": SGD(lr=0.2),
    "momentum": SGD(lr=0.2, momentum=0.7),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "row-wise": RowWiseAdagrad(lr=0.1),
    "adam": SparseAdam(lr=0.05),
}
DENSE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.05, momentum=0.5),
    "adam": lambda found: torch.optim.Adam(found, lr=0.02),
}
OF_ROWS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.2),
    "adagrad": lambda found: torch.optim.Adagrad(
        found, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1
    ),
    "row-wise": lambda found: LocalRowWise(found, lr=0.1),
    "adam": lambda found: torch.optim.SparseAdam(found, lr=0.05),
}


class Tower(nn.Module):
    """A part of the model that has a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, 4, mode="mean", sparse=True, padding_idx=3)
        self.layer = nn.Linear(4, 4)

    def forward(self, users: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.layer(self.users(users)))
        return found


class Net(nn.Module):
    """Tables of which some are sparse enough for servers, and a dense part."""

    uses_spare = False

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 6, mode="sum", sparse=True, include_last_offset=True)
        self.tower = Tower()
        self.days = nn.Embedding(DAYS, 4, sparse=True)
        self.spare = nn.Linear(4, 4)  # not always used
        self.head = nn.Linear(10, 1)

    def forward(self, words: Any, users: Tensor, days: Tensor) -> Tensor:
        bags = self.words(words[0], words[1], per_sample_weights=words[2])
        side = self.tower(users) + self.days(days)
        if self.uses_spare:
            side = side + self.spare(side)
        found: Tensor = self.head(torch.cat([bags, side], dim=1)).squeeze(1)
        return found


def make_net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def draw(trainer: int, step: int, dtype: torch.dtype = torch.float64, rows: int = BATCH) -> Any:
    """Returns the arguments of the model, and targets."""
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    lengths = torch.randint(0, 5, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(lengths.sum())
    words = (torch.rand(count, generator=generator).pow(3) * WORDS).long()
    weights = torch.rand(count, generator=generator, dtype=torch.float64).to(dtype)
    users = torch.randint(0, USERS, (rows, 2), generator=generator)
    days = torch.randint(0, DAYS, (rows,), generator=generator)
    target = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
    return ((words, offsets, weights), users, days), target


def join_batches(batches: Sequence[Any]) -> Any:
    """Returns one batch of those of all trainers."""
    words = [given[0] for given, _ in batches]
    ids = torch.cat([each[0] for each in words])
    offsets, begin = [torch.zeros(1, dtype=torch.int64)], 0
    for each in words:
        offsets.append(each[1][1:] + begin)
        begin += int(each[1][-1])
    joined = ids, torch.cat(offsets), torch.cat([each[2] for each in words])
    users, days = (torch.cat([given[place] for given, _ in batches]) for place in (1, 2))
    return (joined, users, days), torch.cat([target for _, target in batches])


def loss_of(model: Callable[..., Tensor], batch: Any) -> Tensor:
    given, target = batch
    return functional.mse_loss(model(*given), target)


# One process


def train_alone(
    rule: str, dense: str, steps: int, dtype: torch.dtype, trainers: int = 2, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains with the joined batches; returns the state and the norms or losses."""
    net = make_net(0, dtype)
    net.uses_spare = options.get("uses_spare", False)
    if "words" in options:
        net.words.weight.data.copy_(options["words"])
    tables = [net.words.weight, net.tower.users.weight, net.days.weight]
    is_table = {id(each) for each in tables}
    optimizers = [
        OF_ROWS[rule](tables),
        DENSE[dense]([each for each in net.parameters() if id(each) not in is_table]),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    found = []
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        for part in range(options.get("passes", 1)):
            batches = [
                draw(trainer, 50 * part + step, dtype, options.get("rows", BATCH))
                for trainer in range(trainers)
            ]
            loss = loss_of(net, join_batches(batches))
            (loss * options.get("factor", 1)).backward()  # type: ignore[no-untyped-call]
        found.append(loss.item())
        if "max_norm" in options:
            found[-1] = float(_clip(net, options["max_norm"], options.get("norm_type", 2.0)))
        for each in optimizers:
            each.step()
        if options.get("schedules"):
            for scheduler in schedulers:
                scheduler.step()
    return net.state_dict(), found


def _clip(net: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Clips by PyTorch, which takes no sparse gradients; those stay sparse for the optimizer."""
    grads = {each: each.grad for each in net.parameters() if each.grad is not None}
    for each, grad in grads.items():
        each.grad = grad.to_dense()
    total = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm, norm_type)
    for each, grad in grads.items():
        if grad.is_sparse:
            rows = grad.coalesce().indices()
            assert each.grad is not None
            each.grad = torch.sparse_coo_tensor(rows, each.grad[rows[0]], grad.shape)
    return total


# Trainers


def train(
    me: int,
    rule: str,
    dense: str,
    steps: int,
    dtype: torch.dtype,
    servers: Sequence[str],
    places: Any = None,
    way: str = "backward",
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], str]:
    """Trains on this worker; returns the state of all, norms or losses, and the plan."""
    uses_spare = options.get("uses_spare", False)
    ddp = {} if uses_spare else {"find_unused_parameters": True}
    net = make_net(me, dtype)  # Only the weights of the first trainer count.
    net.uses_spare = uses_spare
    model = HybridModel(
        net,
        servers,
        batches=[draw(me, step, dtype)[0] for step in range(3)],
        places=places,
        replicas=options.get("replicas", ()),
        **ddp,
    )
    optimizer = model.optimizer(RULES[rule], DENSE[dense])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = []
    for step in range(steps):
        found.append(_step(model, optimizer, me, step, dtype, way, options))
        if options.get("schedules"):
            scheduler.step()
    result = model.full_state_dict(), found, str(model.plan)
    torch.distributed.barrier()
    model.close()
    return result


def _step(
    model: HybridModel,
    optimizer: HybridOptimizer,
    me: int,
    step: int,
    dtype: torch.dtype,
    way: str,
    options: dict[str, Any],
) -> float:
    rows = options.get("rows", BATCH)
    if way == "context":
        with autograd.context() as context_id:
            loss = loss_of(model, draw(me, step, dtype, rows))
            autograd.backward(context_id, [loss])
            found = loss.item()
            if "max_norm" in options:
                found = float(optimizer.clip_grad_norm_(options["max_norm"], context_id=context_id))
            optimizer.step(context_id)
        return found
    optimizer.zero_grad()
    passes = options.get("passes", 1)
    for part in range(passes - 1):
        with model.no_sync():
            loss_of(model, draw(me, 50 * part + step, dtype, rows)).backward()
    loss = loss_of(model, draw(me, 50 * (passes - 1) + step, dtype, rows))
    loss.backward()
    found = loss.item()
    if "max_norm" in options:
        norm_type = options.get("norm_type", 2.0)
        found = float(optimizer.clip_grad_norm_(options["max_norm"], norm_type))
    optimizer.step()
    return found


# Models that stay open between calls of a test


class Open:
    """A model under training, with all that a snapshot of it has."""

    def __init__(self, me: int, servers: Sequence[str], places: Any, seed: int) -> None:
        self.me = me
        self.model = HybridModel(
            make_net(seed),
            servers,
            batches=[draw(me, 0)[0]],
            places=places,
            timeout=20,
            find_unused_parameters=True,
        )
        self.optimizer = self.model.optimizer(RULES["adam"], DENSE["adam"])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = {"losses": [], "scheduler": self.scheduler, "best": 0.0}

    def step(self, step: int, max_norm: float | None = None) -> float:
        options = {} if max_norm is None else {"max_norm": max_norm}
        loss = _step(self.model, self.optimizer, self.me, step, torch.float64, "backward", options)
        self.scheduler.step()
        self.state["losses"].append(loss)
        self.state["best"] = loss / 2
        return loss


_open: dict[str, Open] = {}


def open_model(me: int, servers: Sequence[str], places: Any = None, seed: int = 0) -> None:
    _open["model"] = Open(me, servers, places, seed)


def make_step(step: int, max_norm: float | None = None) -> float:
    return _open["model"].step(step, max_norm)


def save_model(directory: str, step: int, since: int | None = None) -> bool:
    opened = _open["model"]
    found = opened.model.save(directory, step=step, state=opened.state, since=since)
    return found is not None


def restore_model(directory: str) -> tuple[int, list[float], float, list[float]]:
    """Restores; returns the step, the state of the program, and the learning rates."""
    opened = _open["model"]
    step = opened.model.restore(directory, state=opened.state)
    rates = [float(group["lr"]) for group in opened.optimizer.param_groups]
    return step, list(opened.state["losses"]), opened.state["best"], rates


def weights_of_model() -> dict[str, Tensor]:
    return _open["model"].model.full_state_dict()


def apply_model(step: int) -> Tensor:
    """Returns the loss of this trainer's batch; another worker calls this in a context."""
    opened = _open["model"]
    return loss_of(opened.model, draw(opened.me, step))


def step_in_context(context_id: int) -> None:
    _open["model"].optimizer.step(context_id)


def clip_dense_part(step: int) -> list[str]:
    """Clips the parameters that a trainer has, twice; returns what it is told."""
    opened = _open["model"]
    loss_of(opened.model, draw(opened.me, step)).backward()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            nn.utils.clip_grad_norm_(opened.model.parameters(), 1.0)
    opened.optimizer.zero_grad()
    return [str(each.message) for each in found if each.filename == __file__]


def close_model() -> None:
    _open.pop("model").model.close()


def raised_by_step(me: int, hook: Any) -> tuple[str, str]:
    """Returns the type and the text of the error of a backward pass with a hook."""
    model = HybridModel(
        make_net(me),
        ["worker2"],
        places={"words": TableWise("worker2")},
        find_unused_parameters=True,
        comm_hook=hook,
    )
    try:
        loss_of(model, draw(me, 0)).backward()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        model.close()
    return "", ""


def raised_by_model(me: int, arguments: dict[str, Any], seed: int = 0) -> tuple[str, str]:
    """Returns the type and the text of the error of making a model."""
    given = dict(arguments)
    servers = given.pop("servers", ["worker2"])
    net = make_net(seed)
    if given.pop("has_wider_head", False):
        net.head = nn.Linear(10, 2).double()
    try:
        HybridModel(net, servers, **given)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# Options of the tables


def spread(ids: Tensor) -> Tensor:
    """Returns ids that are no numbers of rows."""
    return ids * 1_000_003 - 2**40


def reduce_as_ddp(state: Any, bucket: Any) -> Any:
    """Averages a bucket as DDP does, and counts it."""
    if state is not None:
        state.append(bucket.index())
    return allreduce_hook(None, bucket)


def reduce_nothing(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def raise_in_reduction(state: Any, bucket: Any) -> Any:
    raise ArithmeticError("in the hook")


def forget_gradients(state: Any, bucket: Any) -> Any:
    """Leaves dense gradients out of the step: zeros."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().zero_())
    return future


def train_with(
    me: int, steps: int, max_norm: float | None = None, ahead: int | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float], dict[int, int], dict[str, int]]:
    """Trains a model with further options.

    Returns:
        The state, norms or losses, the staleness, and the hits of the cache by table.
    """
    is_dynamic = "dynamic" in options
    counted = options.get("comm_state")
    model = HybridModel(
        make_net(me), ["worker2"], find_unused_parameters=True, timeout=30, **options
    )
    optimizer = model.optimizer(RULES["sgd"], DENSE["sgd"])
    batches = [draw(me, step) for step in range(steps)]
    if is_dynamic:
        batches = [
            (((spread(words), offsets, weights), *others), target)
            for ((words, offsets, weights), *others), target in batches
        ]
    found = []
    with model.stream(batches, ahead or 0, lambda batch: batch[0]) as stream:
        for batch in batches if ahead is None else stream:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(loss.item())
            if max_norm is not None:
                found[-1] = float(optimizer.clip_grad_norm_(max_norm))
            optimizer.step()
    state = model.full_state_dict()
    assert counted is None or len(counted) >= steps  # At least a bucket in each backward pass.
    torch.distributed.barrier()
    assert model.tables is not None
    staleness = model.tables.staleness()
    hits = {name: each.hits for name, each in model.tables.traffic().items()}
    torch.distributed.barrier()
    model.close()
    return state, found, staleness, hits


def train_scaled(me: int, places: Any, overflows_at: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains with a scaled loss; once a row's gradient of the second trainer alone overflows.

    Returns:
        The scale after each step, and the state.
    """
    model = HybridModel(
        make_net(me), ["worker2"], find_unused_parameters=True, timeout=30, places=places
    )
    optimizer = model.optimizer(RULES["sgd"], DENSE["sgd"])
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, draw(me, step))).backward()  # type: ignore[no-untyped-call]
        if step == overflows_at and me == 1:
            leaf = optimizer.param_groups[0]["params"][0]
            leaf.grad.view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = model.full_state_dict()
    torch.distributed.barrier()
    model.close()
    return scales, state


# Recovery


def _kill(worker: str) -> None:
    os.kill(rpc.rpc_sync(worker, os.getpid), signal.SIGKILL)


def wait_in_reduction(
    me: int, trainers: Sequence[str], servers: Sequence[str], killed: str
) -> tuple[str, str, float]:
    """Loses a server between two pulls: the second trainer waits in an all-reduce by then.

    Returns:
        The type of the error of this trainer's pass, the worker that it names, and how many
        seconds after the loss the error was raised.
    """
    init_process_group(trainers)
    places = {name: RowWise(*servers) for name in ("words", "tower.users", "days")}
    model = HybridModel(
        make_net(), servers, places=places, name="waiting", find_unused_parameters=True
    )
    optimizer = model.optimizer(RULES["adam"], DENSE["adam"])
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, draw(me, number)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    loss = loss_of(model, draw(me, 2))
    rpc.barrier(trainers)
    began_s = time.monotonic()
    try:
        if me == 0:
            _kill(killed)
            with torch.no_grad():
                while True:  # Until a pull notices the loss. The process group stays as it is.
                    loss_of(model, draw(me, 3))
        loss.backward()  # type: ignore[no-untyped-call]
        raise AssertionError
    except WorkerLost as error:
        found = type(error).__name__, error.worker, time.monotonic() - began_s
    rpc.barrier(trainers)
    with contextlib.suppress(WorkerLost):
        model.close()
    torch.distributed.destroy_process_group()
    return found
