"""Connects the processes of a side and follows their orders; runs in the worker processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from benchmarks.frame import api
from benchmarks.frame.activities import run_until_ordered
from benchmarks.frame.place import Place
from benchmarks.frame.work import Numbers, Work, measure

Works = Mapping[str, Work | Numbers]


def run_rpc(place: Place, answers: TextIO) -> None:
    """Runs one worker of a group, by torch's RPC or by Weft's, with the same calls."""
    with joined_group(place) as library:
        program = _program(place)  # after joining: its import may use ``api.current()``
        if place.rank == 0:
            follow_orders(program.works(library), answers)
        else:
            serve(answers)


@contextlib.contextmanager
def joined_group(place: Place) -> Iterator[api.Api]:
    """Makes this process a worker of the group while the block runs."""
    import torch

    torch.set_num_threads(1)
    library = api.enter(place.api, place.rank, place.size)
    os.environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))
    kind = "RpcBackendOptions" if place.api == "weft" else "TensorPipeRpcBackendOptions"
    library.rpc.init_rpc(
        api.worker_name(place.rank),
        rank=place.rank,
        world_size=place.size,
        rpc_backend_options=getattr(library.rpc, kind)(**place.options),
    )
    yield library
    library.rpc.shutdown()


def run_raw(place: Place, answers: TextIO) -> None:
    """Runs a process at one end of the Unix sockets between the first process and the others."""
    program = _program(place)
    with contextlib.ExitStack() as ends:
        connections = [ends.enter_context(socket.socket(fileno=fd)) for fd in place.descriptors]
        if place.rank == 0:
            follow_orders(getattr(program, f"{_plain(place.side)}_works")(connections), answers)
        else:
            _answer(answers, [])
            getattr(program, f"serve_{_plain(place.side)}")(connections[0])


def run_alone(place: Place, answers: TextIO) -> None:
    """Runs the works of a side that has no peers, or starts its own."""
    works = getattr(_program(place), f"{_plain(place.side)}_works")()
    with contextlib.ExitStack() as ends:
        if hasattr(works, "__enter__"):  # a side that needs cleanup returns a context manager
            works = ends.enter_context(works)
        follow_orders(works, answers)


def run_ranks(place: Place, answers: TextIO) -> None:
    """Runs one rank of a group that the side itself connects, by other means than RPC."""
    side = importlib.import_module(f"{place.folder}.{_plain(place.side)}_side")
    side.join(place)
    if place.rank == 0:
        follow_orders(side.works(), answers)
        side.leave()
    else:
        _answer(answers, [])
        side.serve()


RUNNERS: dict[str, Callable[[Place, TextIO], None]] = {
    "rpc": run_rpc,
    "raw": run_raw,
    "alone": run_alone,
    "ranks": run_ranks,
}


def follow_orders(works: Works, answers: TextIO, forked: Sequence[int] = ()) -> None:
    """Follows the orders on standard input until it ends; answers each order with a line.

    The CPU time of the processes ``forked`` counts as well.
    """
    _answer(answers, sorted(works))
    for line in sys.stdin:
        order = json.loads(line)
        work = works[order["work"]]
        if order["warm_up"] and isinstance(work, Work):
            measure(work, order["warm_up"], [])
        pids = [*order["pids"], *forked] if order["pids"] else []
        _answer(answers, measure(work, order["operations"], pids))


def serve(answers: TextIO) -> None:
    """Runs the ordered activity in the main thread, none at first, until the input ends."""
    orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_forward, args=(orders,), daemon=True).start()
    activity: str | None = ""
    while activity is not None:
        _answer(answers, [])
        if activity:
            run_until_ordered(activity, orders)
        activity = orders.get()


def _forward(orders: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line)["activity"])
    orders.put(None)


def _answer(answers: TextIO, answer: object) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _program(place: Place) -> Any:
    return importlib.import_module(f"{place.folder}.work")


def _plain(side: str) -> str:
    return side.replace(" ", "_")
