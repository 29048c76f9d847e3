"""A program under ``auto_init_rpc`` that fails: all others are told why, whoever they talk to."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.end_to_end.test_mapreduce_starting import (
    PROMPT_S,
    Process,
    end_of,
    start,
    start_three,
)

__all__ = ["start", "start_three"]

# Nothing calls worker1: the others need not have a connection to it.
FAILING = """
import sys, threading
import torchweft.mapreduce.world as todist
from torchweft import rpc

heard = threading.Event()

def tell(lost):
    print("lost:", lost.worker, lost.cause, flush=True)
    heard.set()

@todist.auto_init_rpc(rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
def main():
    forget = rpc.on_worker_lost(tell)
    todist.barrier()
    if todist.get_rank() == 1:
        raise ValueError("boom")
    assert heard.wait(60)
    forget()

main()
"""


def test_those_who_never_called_a_failing_worker_are_told_why(
    start_three: Callable[..., list[Process]],
) -> None:
    processes = start_three(FAILING)
    status, _, err = end_of(processes[1])
    assert (status, err.splitlines()[-1]) == (1, "ValueError: boom")
    for process in (processes[0], processes[2]):
        status, out, err = end_of(process, PROMPT_S)
        assert out == "lost: worker1 its program raised ValueError: boom\n", err
        assert status == 1
