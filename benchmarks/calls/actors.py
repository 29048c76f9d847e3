"""The same small call on Ray's and Monarch's actors, for ``make bench-peers``.

Neither library is imported unless its side runs. The CPU time of their own processes is not
counted, and these processes are not stopped while other sides are measured. So these sides run
only on request.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.frame.work import Work

IN_FLIGHT = (100, 2000)


@contextlib.contextmanager
def ray_works() -> Iterator[dict[str, Work]]:
    """Starts Ray on this machine with one actor that returns its argument."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    class Echo:
        def echo(self, value: object) -> object:
            return value

    actor = ray.remote(Echo).remote()
    try:
        yield _works(lambda tensor: actor.echo.remote(tensor), ray.get, ray.get)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def monarch_works() -> Iterator[dict[str, Work]]:
    """Starts one Monarch process with an actor that returns its argument."""
    monarch: Any = importlib.import_module("monarch.actor")

    class Echo(monarch.Actor):  # type: ignore[misc]  # known at run time only
        @monarch.endpoint  # type: ignore[untyped-decorator]
        def echo(self, value: object) -> object:
            return value

    processes = monarch.this_host().spawn_procs(per_host={"procs": 1})
    actor = processes.spawn("echo", Echo)
    try:
        yield _works(actor.echo.call_one, _get, lambda calls: [call.get() for call in calls])
    finally:
        processes.stop().get()


def _get(call: Any) -> object:
    return call.get()


def _works(
    start: Callable[[torch.Tensor], Any],
    wait: Callable[[Any], object],
    wait_all: Callable[[list[Any]], object],
) -> dict[str, Work]:
    tensor = torch.ones(2)

    def overlapping(in_flight: int) -> Work:
        return Work(lambda: wait_all([start(tensor) for _ in range(in_flight)]), in_flight)

    works = {f"flight {count}": overlapping(count) for count in IN_FLIGHT}
    return {"sync 1": Work(lambda: wait(start(tensor))), **works}
