"""Mistakes in calls, and workers that end while others need them."""

from __future__ import annotations

from tests.contract.mistakes.mistake import PROGRAM, Mistake, alone, in_cluster

_BEFORE = """
import os
import sys
import threading
import time


def divide(numerator, denominator):
    return numerator / denominator


def divide_there(worker, denominator):
    return rpc.rpc_sync(worker, divide, args=(1, denominator))


def train(seconds):
    time.sleep(seconds)


def batches():
    yield from range(3)


def leave(code):
    sys.exit(code)


def crash(code):
    os._exit(code)


def allocate(exabytes):
    return torch.empty(exabytes << 60, dtype=torch.uint8)
"""

CALLING = (
    Mistake(
        "A worker that is spelt wrong",
        in_cluster('rpc.rpc_sync("woker1", divide, args=(1, 2))  # <-', _BEFORE),
        r"UnknownWorker: ",
    ),
    Mistake(
        "The name of a function in place of the function",
        alone('rpc.rpc_sync("trainer", "divide", args=(1, 2))  # <-'),
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "One argument without a comma",
        alone('rpc.rpc_sync("trainer", torch.ones, args=(3))  # <-'),
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "Too few arguments",
        in_cluster('rpc.rpc_sync("worker1", divide, args=(1,))  # <-', _BEFORE),
        r"TypeError: ",
    ),
    Mistake(
        "A time limit in quotes",
        alone('rpc.rpc_sync("trainer", torch.add, args=(1, 2), timeout="5")  # <-'),
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "An argument that cannot be sent",
        in_cluster(
            """
            state = {"step": 1, "lock": threading.Lock()}
            rpc.rpc_sync("worker1", print, args=(state,))  # <-
            """,
            _BEFORE,
        ),
        r"SerializationError: ",
    ),
    Mistake(
        "A result that cannot be sent",
        in_cluster('rpc.rpc_sync("worker1", batches)  # <-', _BEFORE),
        r"SerializationError: ",
    ),
    Mistake(
        "A lambda that takes along what cannot be sent",
        in_cluster(
            """
            log = open("log.txt", "w")
            rpc.rpc_sync("worker1", lambda: log.write("here"))  # <-
            """,
            _BEFORE,
        ),
        r"SerializationError: ",
    ),
    Mistake(
        "The remote function raises",
        in_cluster('rpc.rpc_sync("worker1", divide, args=(1, 0))  # <-', _BEFORE),
        r"ZeroDivisionError: ",
    ),
    Mistake(
        "A function that it calls on another worker raises",
        in_cluster('rpc.rpc_sync("worker1", divide_there, args=("worker0", 0))  # <-', _BEFORE),
        r"ZeroDivisionError: ",
    ),
    Mistake(
        "A call takes longer than its limit",
        in_cluster('rpc.rpc_sync("worker1", train, args=(2,), timeout=1)  # <-', _BEFORE),
        r"CallTimeout: ",
    ),
    Mistake(
        "A call that fails, and nobody waits for it",
        in_cluster(
            """
            rpc.rpc_async("worker1", divide, args=(1, 0))  # <-
            time.sleep(1)
            """,
            _BEFORE,
        ),
        r"never looked at",
    ),
    Mistake(
        "Memory that no worker has",
        in_cluster('rpc.rpc_sync("worker1", allocate, args=(1,))  # <-', _BEFORE),
        r"RuntimeError: ",
    ),
    Mistake(
        "`sys.exit` in a remote function",
        in_cluster('rpc.rpc_sync("worker1", leave, args=(3,))  # <-', _BEFORE),
        r"RemoteError: ",
    ),
    Mistake(
        "The worker's process ends",
        in_cluster('rpc.rpc_sync("worker1", crash, args=(3,))  # <-', _BEFORE),
        r"WorkerLost: ",
    ),
    Mistake(
        "The worker's process is killed",
        in_cluster(
            """
            call = rpc.rpc_async("worker1", train, args=(60,))
            rpc.rpc_sync("worker0", os.kill, args=(rpc.rpc_sync("worker1", os.getpid), 9))  # <-
            call.wait()
            """,
            _BEFORE,
        ),
        r"WorkerLost: ",
    ),
    Mistake(
        "A worker ends without `shutdown()`",
        """
        import os
        from torchweft import rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}")
        rpc.barrier()
        if rank == 0:
            rpc.shutdown()  # <-
        """,
        r"ShutdownError: ",
        starts=tuple(
            f"MASTER_ADDR=127.0.0.1 MASTER_PORT=PORT WORLD_SIZE=2 RANK={rank} {PROGRAM}"
            for rank in range(2)
        ),
        shown="rank 1 returns from main() without rpc.shutdown()",
    ),
    Mistake(
        "A function that never returns, when the cluster ends",
        in_cluster('call = rpc.rpc_async("worker1", train, args=(600,))  # <-', _BEFORE),
        r"ShutdownError: ",
        starts=(f"WEFT_LEAVE_TIMEOUT_S=3 {PROGRAM}",),
    ),
)
