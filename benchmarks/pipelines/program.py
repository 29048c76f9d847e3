"""A program of two processes, as users write it: the first forks the second.

The framework starts it once for each side, as a script. Weft's pipeline has a driver, the first
process. On the other sides both processes make each step, and the first tells the second when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from benchmarks.frame.place import Place
from benchmarks.frame.runners import follow_orders, joined_group
from benchmarks.frame.work import Numbers, Work
from benchmarks.frame.worker import end_with_parent
from benchmarks.pipelines import arithmetic, cases
from benchmarks.pipelines.torch_side import TorchPart
from benchmarks.pipelines.weft_side import WeftPipeline

Works = dict[str, Work | Numbers]


def main() -> None:
    """Forks the second process, and makes steps as the framework orders them."""
    end_with_parent()
    place = Place.from_json(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    here, there = multiprocessing.Pipe()
    second = dataclasses.replace(place, rank=1, cores=place.cores_of_others[0])
    process = multiprocessing.get_context("fork").Process(
        target=run_second, args=(second, there), daemon=True
    )
    process.start()
    assert process.pid is not None
    os.sched_setaffinity(0, place.cores)
    with connected(place):
        follow_orders(works(place, here), answers, [process.pid])
        here.send(None)
    process.join()


def run_second(place: Place, first: Connection) -> None:
    """Makes steps as the first process orders them, or as Weft's driver does."""
    end_with_parent()
    os.sched_setaffinity(0, place.cores)
    with connected(place):
        made = functools.cache(functools.partial(_part, place))
        while (order := first.recv()) is not None:
            name, method = order
            first.send(getattr(made(name), method)())


@contextlib.contextmanager
def connected(place: Place) -> Iterator[None]:
    """Makes this process one of two while the block runs."""
    torch.set_num_threads(1)
    if place.side == "weft":
        with joined_group(place):
            yield
    elif place.side == "torch":
        address = f"tcp://{place.address}:{place.port}"
        distributed.init_process_group(
            "gloo", rank=place.rank, world_size=cases.WORKERS, init_method=address
        )
        yield
        distributed.destroy_process_group()
    else:
        yield


def works(place: Place, second: Connection) -> Works:
    """Returns the steps and the losses of each case; pipelines are made when first needed."""
    made = functools.cache(functools.partial(_part, place))

    def call(name: str, method: str) -> Any:
        if place.side == "weft":
            return getattr(made(name), method)()
        second.send((name, method))  # Both processes call the method at the same time.
        getattr(made(name), method)()
        return second.recv()

    steps = arithmetic.STEPS if place.side == "arithmetic" else 1
    found: Works = {}
    for name in cases.CASES:
        found[name] = Work(functools.partial(call, name, "step"), steps)
        if place.side != "arithmetic":
            found[f"{name} losses"] = Numbers(functools.partial(call, name, "losses"))
    return found


def _part(place: Place, name: str) -> WeftPipeline | TorchPart | arithmetic.ArithmeticPart:
    """Returns the part of a pipeline that this process has."""
    case = cases.CASES[name]
    if place.side == "weft":
        return WeftPipeline(case, ["worker0", "worker1"])
    if place.side == "torch":
        return TorchPart(case, place.rank)
    return arithmetic.ArithmeticPart(case, place.rank)


if __name__ == "__main__":
    main()
