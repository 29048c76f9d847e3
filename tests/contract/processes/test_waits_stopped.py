"""A worker that is stopped lives, and answers nothing: every public wait for it ends, and names it.

The list of all waits is ``tests/waits/list.tsv``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import stopped
from torchweft import checkpoint, mapreduce, optim, rpc
from torchweft.embedding import RowWise, TableConfig, Tables, plan_tables
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule

LIMIT_S = 3.0
SLACK_S = 12.0
STOPPED = "worker1"
LARGE_BYTES = 96 << 20

# What the stopped worker was to get is kept until it is lost.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
Attempt = Callable[[], object]


class Holder:
    """An object on the worker that is stopped."""

    def __init__(self) -> None:
        self.value = 0

    def get(self) -> int:
        return self.value


def in_context(attempt: Callable[[int], object]) -> None:
    with torchweft.autograd.context() as context_id:
        attempt(context_id)


def prepare(directory: Path) -> dict[str, Attempt]:
    """Makes objects on both workers; returns what waits for the second one."""
    both = ["worker0", STOPPED]
    everybody = ["driver", *both]
    holder: Any = rpc.remote(STOPPED, Holder)
    holder.rpc_sync().get()
    actors: Any = rpc.actors(both, Holder)
    actors.rpc_sync(Holder.get)
    values = rpc.stream(STOPPED, range, args=(1000,), ahead=1, timeout=LIMIT_S)
    merging = rpc.stream(STOPPED, range, args=(1000,), ahead=1, timeout=LIMIT_S)
    for each in (values, merging):
        next(each)
    module = RemoteModule(STOPPED, nn.Linear, (2, 2))
    module(torch.ones(1, 2))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    plan = plan_tables([TableConfig("words", 50, 4)], both, places={"words": RowWise(*both)})
    tables = Tables(plan, trainers=["driver"], timeout=LIMIT_S)
    ids = torch.arange(50).view(1, -1)
    tables({"words": ids})
    model = nn.Linear(2, 2)
    state = {"model": model, "remote": module}
    checkpoint.save(directory, state, step=1)

    def step(context_id: int) -> None:
        optimizer.step(context_id)

    def clip(context_id: int) -> None:
        optim.clip_grad_norm_(context_id, module.remote_parameters(), 1.0)

    async def awaited() -> None:
        await rpc.rpc_async(STOPPED, functions.add, args=(1, 2), timeout=LIMIT_S)

    def drain(stream: Iterator[int]) -> None:
        for _ in range(10):
            next(stream)

    large = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    return {
        "rpc_sync": lambda: rpc.rpc_sync(STOPPED, functions.add, args=(1, 2), timeout=LIMIT_S),
        "rpc_sync of a large tensor": lambda: rpc.rpc_sync(
            STOPPED, torch.numel, args=(large,), timeout=LIMIT_S
        ),
        "rpc_async": lambda: rpc.rpc_async(STOPPED, os.getpid, timeout=LIMIT_S).wait(),
        "await": lambda: asyncio.run(awaited()),
        "wait_all": lambda: torch.futures.wait_all(
            [rpc.rpc_async(each, os.getpid, timeout=LIMIT_S) for each in both]
        ),
        "remote and to_here": lambda: rpc.remote(STOPPED, os.getpid).to_here(timeout=LIMIT_S),
        "to_here": lambda: holder.to_here(timeout=LIMIT_S),
        "a method": lambda: holder.rpc_sync(timeout=LIMIT_S).get(),
        "actors": lambda: actors.rpc_sync(Holder.get),
        "rpc_all": lambda: rpc.rpc_all(both, os.getpid, timeout=LIMIT_S),
        "as_completed": lambda: list(
            rpc.as_completed([rpc.rpc_async(STOPPED, os.getpid, timeout=0)], timeout=LIMIT_S)
        ),
        "barrier": lambda: rpc.barrier(everybody, timeout=LIMIT_S),
        "all_gather": lambda: rpc.all_gather(1, [*both, "driver"], timeout=LIMIT_S),
        "a barrier of others": lambda: rpc.rpc_sync(
            "worker0", rpc.barrier, args=(both, LIMIT_S), timeout=LIMIT_S + SLACK_S
        ),
        "stream": lambda: drain(values),
        "merged": lambda: drain(iter(rpc.merged([merging], timeout=LIMIT_S))),
        "the begin of a stream": lambda: next(
            rpc.stream(STOPPED, range, args=(3,), timeout=LIMIT_S)
        ),
        "stacks": lambda: rpc.stacks(STOPPED, timeout=LIMIT_S),
        "a map": lambda: mapreduce.remote_sync_call(
            functions.identity, args=(torch.ones(9),), timeout=LIMIT_S, rerun=False
        ),
        "RemoteModule": lambda: module(torch.ones(1, 2)),
        "a new RemoteModule": lambda: RemoteModule(STOPPED, nn.Linear, (2, 2)),
        "DistributedOptimizer.step": lambda: in_context(step),
        "clip_grad_norm_": lambda: in_context(clip),
        "Tables": lambda: tables({"words": ids}),
        "new Tables": lambda: Tables(plan, name="more", trainers=["driver"], timeout=LIMIT_S),
        "checkpoint.save": lambda: checkpoint.save(directory, state, step=2, timeout=LIMIT_S),
        "checkpoint.restore": lambda: checkpoint.restore(directory, state, timeout=LIMIT_S),
    }


def outcome_of(attempt: Attempt) -> tuple[float, BaseException | None]:
    began_s = time.monotonic()
    try:
        attempt()
    except Exception as error:
        return time.monotonic() - began_s, error
    return time.monotonic() - began_s, None


def test_every_wait_for_a_stopped_worker_ends_and_names_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    options = rpc.RpcBackendOptions(rpc_timeout=LIMIT_S)
    with torchweft.cluster(
        workers=2, nursery=nursery, check=False, rpc_backend_options=options
    ) as group:
        attempts = prepare(tmp_path)
        with stopped(group.pids[STOPPED]), ThreadPoolExecutor(len(attempts)) as pool:
            found = dict(zip(attempts, pool.map(outcome_of, attempts.values()), strict=True))
        os.kill(group.pids[STOPPED], signal.SIGKILL)
    told = [f"{name}: {took_s:.1f} s, {error!r}" for name, (took_s, error) in found.items()]
    print(*told, sep="\n")
    wrong = [
        name
        for name, (took_s, error) in found.items()
        if took_s > LIMIT_S + SLACK_S or f"'{STOPPED}'" not in str(error)
    ]
    assert not wrong, told
