"""Groups of workers from start to end, forked from this process; started by ``measuring.py``.

The process has imported torch and the library, so that a group starts as fast as it joins. Starting
an interpreter and importing torch takes the same time for every library, a hundred times as long.
Each worker receives orders through its own pipe and reports when they are done; all processes read
the same monotonic clock.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks.frame import api
from benchmarks.frame.figures import Round
from benchmarks.frame.worker import end_with_parent
from benchmarks.scale import processes

ANSWER_TIMEOUT_S = 180.0
SETTLE_S = 0.5
IDLE_S = 1.5


class Nestling:
    """A forked worker as its parent sees it: a process, and a pipe in each direction."""

    def __init__(self, order: dict[str, Any], rank: int, others: Sequence[Nestling]) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for parent in (self, *others):  # or these pipes outlive the parent
                os.close(parent._orders)
                os.close(parent._answers)
            _live(order, rank, orders, answers)
        os.close(orders)
        os.close(answers)

    def tell(self, what: str) -> None:
        os.write(self._orders, f"{what}\n".encode())

    def answer(self) -> Any:
        """Returns the worker's answer to its order: one line; only one is ever pending."""
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([self._answers], [], [], ANSWER_TIMEOUT_S)[0]:
                raise RuntimeError(f"process {self.pid} has not answered in {ANSWER_TIMEOUT_S} s")
            received = os.read(self._answers, 1 << 20)
            if not received:
                raise RuntimeError(f"process {self.pid} has ended; its errors are above")
            text += received
        return json.loads(text)


def main() -> None:
    """Runs a group of each size, one after the other, and prints their figures."""
    end_with_parent()
    order = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    api.use(api.Api(api.PACKAGES[order["api"]], 0, 1))  # imported once, before any fork
    found = {}
    for size in order["sizes"]:
        options = {"init_method": f"file://{order['stores']}/{size}", **order["options"]}
        figures = _measure({**order, "size": size, "options": options})
        found[size] = {name: vars(figure) for name, figure in figures.items()}
    print(json.dumps(found), flush=True)


def _measure(order: dict[str, Any]) -> dict[str, Round]:
    begin = time.monotonic()
    group: list[Nestling] = []
    for rank in range(order["size"]):
        group.append(Nestling(order, rank, group))
    started_s = max(worker.answer() for worker in group) - begin
    pids = [worker.pid for worker in group]
    start_cpu_s = processes.cpu_s(pids)
    calls = _ask(group[:1], "call")[0]
    found = {
        "start": Round([started_s], start_cpu_s),
        "call": Round(calls["values"], calls["cpu_s"]),
        **_footprint(pids),
    }
    begin = time.monotonic()
    stopped_s = max(_ask(group, "stop")) - begin
    found["stop"] = Round([stopped_s])
    for pid in pids:
        os.waitpid(pid, 0)
    return found


def _footprint(pids: Sequence[int]) -> dict[str, Round]:
    time.sleep(SETTLE_S)
    cpu_before = [processes.cpu_s([pid]) for pid in pids]
    time.sleep(IDLE_S)
    idle = max(processes.cpu_s([pid]) - cpu for pid, cpu in zip(pids, cpu_before, strict=True))
    memory = [processes.memory_bytes(pid) for pid in pids]
    threads = max(processes.threads(pid) for pid in pids)
    return {
        "idle": Round([idle / IDLE_S]),
        "threads": Round([float(threads)]),
        "caller sockets": Round([float(processes.sockets(pids[0]))]),
        "callee sockets": Round([float(max(map(processes.sockets, pids[1:])))]),
        "pss": Round([float(one.pss) for one in memory]),
        "private": Round([float(one.private) for one in memory]),
    }


def _ask(workers: Sequence[Nestling], what: str) -> list[Any]:
    for worker in workers:
        worker.tell(what)
    return [worker.answer() for worker in workers]


def _live(order: dict[str, Any], rank: int, orders: int, answers: int) -> None:
    """Runs a worker, in the child, until it is told to stop; never returns."""
    status = 1
    try:
        end_with_parent()
        with os.fdopen(orders) as lines, os.fdopen(answers, "w") as said:
            _follow(order, rank, lines, said)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _follow(order: dict[str, Any], rank: int, orders: TextIO, answers: TextIO) -> None:
    from benchmarks.frame.place import Place
    from benchmarks.frame.runners import joined_group
    from benchmarks.scale.work import call_in_turn

    os.sched_setaffinity(0, order["cores"][rank])
    fields = {name: order[name] for name in ("api", "size", "options")}
    place = Place("benchmarks.scale", order["api"], "rpc", rank=rank, cores=[], **fields)
    with joined_group(place) as library:
        _say(answers, time.monotonic())
        for line in orders:
            if line.strip() == "stop":
                break
            _say(answers, call_in_turn(library, order["calls"]))
    _say(answers, time.monotonic())


def _say(answers: TextIO, answer: object) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
