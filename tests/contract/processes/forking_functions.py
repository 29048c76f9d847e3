"""Functions that fork, and whose children come back out of them or end in them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from torchweft import autograd, rpc
from torchweft.rpc import functions


def children() -> set[int]:
    """Returns the processes that this process has forked, those included that have ended."""
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, listing.read_text().split()))
        except OSError:
            continue  # The thread has ended.
    return found


def ping(number: int) -> int:
    return number


# Ways to come back


def returns() -> str:
    return "child" if os.fork() == 0 else "parent"


def raises() -> str:
    if os.fork() == 0:
        raise ValueError("the child does not end in the function")
    return "parent"


def forks_itself() -> str:
    """Comes back twice, from a child and from its child."""
    if os.fork() == 0 and os.fork() == 0:
        return "grandchild"
    return "parent"


def below_another_call() -> str:
    """Comes back out of a call that this worker makes to itself."""
    answer = rpc.rpc_sync(rpc.get_worker_info(), returns)
    assert isinstance(answer, str)
    return answer


async def of_a_coroutine() -> str:
    await asyncio.sleep(0)
    return returns()


async def awaits() -> str:
    """Waits in the child."""
    if os.fork() == 0:
        await asyncio.sleep(0.01)
        return "child"
    return "parent"


@functions.async_execution
def in_a_callback() -> torch.futures.Future[str]:
    future = rpc.rpc_async(rpc.get_worker_info(), ping, (1,))
    then: torch.futures.Future[str] = future.then(lambda done: returns())
    return then


@functions.batched(longest_wait=0.0)
def of_a_batch(numbers: Tensor) -> Tensor:
    return numbers if returns() == "parent" else -numbers


def in_a_batch() -> str:
    result = of_a_batch(torch.ones(1))
    return "parent" if result.item() == 1.0 else "child"


def yields() -> Iterator[str]:
    yield returns()
    yield "last"


def in_a_stream() -> str:
    return ",".join(rpc.stream(rpc.get_worker_info(), yields))


def in_a_hook() -> str:
    """Comes back out of a hook of a backward pass."""
    came: list[str] = []
    with autograd.context() as context_id:
        value = torch.ones(1, requires_grad=True)
        result = rpc.rpc_sync(rpc.get_worker_info(), torch.add, (value * 2, 1))
        value.register_hook(lambda _: came.append(returns()))
        autograd.backward(context_id, [result.sum()])
    return came[0]


WAYS = {
    returns: "parent",
    raises: "parent",
    forks_itself: "parent",
    below_another_call: "parent",
    of_a_coroutine: "parent",
    awaits: "parent",
    in_a_callback: "parent",
    in_a_batch: "parent",
    in_a_stream: "parent,last",
    in_a_hook: "parent",
}
"""Functions whose children come back, and what the parent returns."""


# Children that end in the function


def _join(folder: str, report: str) -> None:
    method = f"file://{folder}/store"
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=20.0)
    rpc.init_rpc("sampler", rank=0, world_size=1, rpc_backend_options=options)
    answer = rpc.rpc_sync("sampler", torch.add, (torch.ones(2), 1)).tolist()
    rpc.shutdown()
    Path(report).write_text(str(answer))


def runs_a_process() -> tuple[int | None, str]:
    """Runs a process of ``multiprocessing`` that joins a group of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report"
        process = multiprocessing.get_context("fork").Process(target=_join, args=(folder, report))
        process.start()
        process.join()
        return process.exitcode, Path(report).read_text()


def waits_for_a_child() -> int:
    """Returns the exit status of a child that ends in the function."""
    pid = os.fork()
    if pid == 0:
        os._exit(7 if threading.active_count() == 1 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def joins_by_torchs_names(folder: str) -> tuple[str, list[float]]:
    """Returns what a forked process of a worker calls in a group of its own, and the worker."""
    from torchweft.compat import rpc as by_torchs_names

    def join(name: str) -> list[float]:
        options = by_torchs_names.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/{name}")
        by_torchs_names.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)
        return call(name)

    def call(name: str) -> list[float]:
        found: list[float] = by_torchs_names.rpc_sync(name, torch.add, (torch.ones(1), 1)).tolist()
        return found

    join("trainer")
    come, out = os.pipe()
    if os.fork() == 0:
        try:
            answer = str(join("sampler"))
            by_torchs_names.shutdown()
        except Exception as error:
            answer = repr(error)
        os.write(out, answer.encode())
        os._exit(0)
    os.close(out)
    with open(come) as file:
        of_child = file.read()
    os.wait()
    own = call("trainer")
    by_torchs_names.shutdown()
    return of_child, own
