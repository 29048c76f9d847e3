"""One of the two processes of a side; started by ``side.py``, not by hand.

The caller reads orders from its standard input, one JSON object a line, and answers each with one
on what was its standard output. The callee serves until the caller ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from benchmarks.calls.work import Work  # at run time only after pinning: it imports torch

MODULES = {"torch": "torch.distributed.rpc", "weft": "weft.rpc"}


def main() -> None:
    """Pins itself to its cores before any thread exists, then serves its role."""
    arguments = parse_arguments()
    os.sched_setaffinity(0, arguments.cores)
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve = serve_raw if arguments.api == "raw" else serve_rpc
    serve(arguments, answers)


def serve_rpc(arguments: argparse.Namespace, answers: TextIO) -> None:
    """Runs one worker of a group of two, by torch's RPC or by Weft's: the same calls."""
    import torch

    from benchmarks.calls.work import CALLEE, rpc_works

    torch.set_num_threads(1)
    rpc: Any = importlib.import_module(MODULES[arguments.api])
    rank = 0 if arguments.role == "caller" else 1
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(arguments.port))
    rpc.init_rpc(("caller", CALLEE)[rank], rank=rank, world_size=2)
    if arguments.role == "caller":
        follow_orders(rpc_works(rpc), answers)
    rpc.shutdown()


def serve_raw(arguments: argparse.Namespace, answers: TextIO) -> None:
    """Runs one end of a Unix-socket ping-pong."""
    from benchmarks.calls.work import answer_raw, raw_works

    with socket.socket(fileno=arguments.descriptor) as connection:
        if arguments.role == "caller":
            follow_orders(raw_works(connection), answers)
        else:
            answer_raw(connection)


def follow_orders(works: dict[str, Work], answers: TextIO) -> None:
    """Carries out orders until the standard input ends."""
    print(json.dumps(sorted(works)), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        work = works[order["work"]]
        work.measure(order["warm_up"])
        answer = measure(work, order["calls"], order["callee"])
        print(json.dumps(answer), file=answers)


def measure(work: Work, calls: int, callee: int) -> dict[str, object]:
    """Runs ``work``; returns the seconds of each run's calls and the CPU time of a call."""
    clocks = (process_clock(os.getpid()), process_clock(callee))
    before = sum(map(time.clock_gettime, clocks))
    seconds = work.measure(calls)
    cpu_s = sum(map(time.clock_gettime, clocks)) - before
    return {"seconds": seconds, "cpu_s": cpu_s / (len(seconds) * work.calls)}


def process_clock(pid: int) -> int:
    """Returns the clock of the CPU time of all threads of a process (``clock_getcpuclockid``).

    It counts what ``getrusage`` does, in nanoseconds, and can be read from outside, so that the
    callee need not be asked by a call that would itself be measured.
    """
    scheduler_clock = 2
    return (~pid << 3) | scheduler_clock


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=("torch", "weft", "raw"), required=True)
    parser.add_argument("--role", choices=("caller", "callee"), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--descriptor", type=int, default=-1)
    parser.add_argument("--cores", type=lambda text: set(map(int, text.split(","))), required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
