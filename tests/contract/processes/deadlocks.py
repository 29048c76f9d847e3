"""Deadlocks of a program's own making, for ``test_observing.py``; lines that wait are marked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.contract.processes.functions import wait_until
from torchweft import autograd, mapreduce, rpc
from torchweft.pipeline import Pipe, ScheduleGPipe

_lock = threading.Lock()


def line_of(mark: str) -> str:
    """Returns the place of a marked line, as reports name it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{Path(__file__)}:{number} in "


# Two workers that call each other, each with one thread and a lock that it holds


def step(other: str, folder: str) -> None:
    """Holds this worker's lock, and calls a function of the other that takes its lock."""
    with _lock:
        Path(folder, rpc.get_worker_info().name).touch()
        wait_until(lambda: Path(folder, other).exists(), lambda: f"{other} has not begun")
        rpc.rpc_sync(other, update)  # calls the other


def update() -> None:
    with _lock:  # takes the lock
        pass


# A barrier that one worker never reaches


def synchronize(workers: list[str]) -> None:
    rpc.barrier(workers)  # comes to the barrier


def read(path: str) -> None:
    """Waits for a writer of a named pipe, who never comes."""
    Path(path).read_bytes()  # waits for a writer


def update_before_barrier(workers: list[str], other: str) -> None:
    """Waits for a call that waits in a barrier, before it comes to that barrier."""
    rpc.rpc_sync(other, synchronize, args=(workers,))  # calls before the barrier
    rpc.barrier(workers)


# A value that is not made


def fetch(reference: rpc.RRef[bytes]) -> bytes:
    return reference.to_here()  # waits for the value


# A map, and a stream, whose function does not return


def map_twice(worker: str, path: str) -> None:
    """Has another worker run two parts of a map, one after the other; the first never ends."""
    mapreduce.remote_sync_call(  # waits for the map
        read, args=(path,), partitioner=lambda path: [(worker, (path,), None)] * 2
    )


def read_lines(path: str) -> Iterator[bytes]:
    yield Path(path).read_bytes()


def follow(worker: str, path: str) -> None:
    for _ in rpc.stream(worker, read_lines, args=(path,)):  # waits for a line
        pass


# A backward pass in which a worker is stopped


class Layer(torch.autograd.Function):
    """Is about to be computed backwards when it makes a file."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def forward(inputs: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = Layer.apply(inputs)
    return output


def train(other: str, folder: str) -> None:
    """Runs a backward pass through another worker, once that is stopped."""
    with autograd.context() as context_id:
        inputs = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(other, forward, args=(inputs,)).sum()
        Path(folder, "forward").touch()
        wait_until(Path(folder, "stopped").exists, lambda: "the worker was not stopped")
        autograd.backward(context_id, [loss])  # runs the backward pass


class Halting(Layer):
    """Is computed backwards once somebody writes to a named pipe."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, path: str) -> torch.Tensor:  # type: ignore[override]
        ctx.path = path
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Path(f"{ctx.path}.begun").touch()
        Path(ctx.path).read_bytes()  # is in the backward pass
        return gradient * 2, None


def forward_that_halts(inputs: torch.Tensor, path: str) -> torch.Tensor:
    output: torch.Tensor = Halting.apply(inputs, path)
    return output


def train_until_it_halts(other: str, path: str) -> None:
    with autograd.context() as context_id:
        inputs = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(other, forward_that_halts, args=(inputs, path)).sum()
        autograd.backward(context_id, [loss])  # runs the pass that halts


# Several calls, streams or stages, of which one ends


def score(other: str, path: str) -> None:
    futures = [rpc.rpc_async(other, read, args=(path,)) for _ in range(2)]
    for _ in rpc.as_completed(futures):  # waits for any score
        pass


def follow_several(other: str, path: str) -> None:
    streams = [rpc.stream(other, read_lines, (path,)) for _ in range(2)]
    with rpc.merged(streams) as values:
        next(values)  # waits for any line


class Reading(torch.nn.Module):
    """A stage of a pipeline whose first forward does not return."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        read(self.path)
        return value


def run_stages(other: str, path: str) -> None:
    stages = torch.nn.Sequential(torch.nn.Linear(2, 2), Reading(path))
    workers = [rpc.get_worker_info().name, other]
    with Pipe(stages, workers, ScheduleGPipe(1), torch.nn.functional.mse_loss) as pipe:
        pipe.step(torch.ones(1, 2), torch.ones(1, 2))  # waits for its stages
