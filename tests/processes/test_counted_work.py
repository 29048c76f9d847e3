"""Counts the work of two workers for small calls and passes, which must not grow unnoticed.

Times depend on the machine and its load; functions called, system calls and bytes do not. A change
that must increase one of these says so here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.internal import overridden

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 10)

# Upper limits for a call, at the caller and at the callee. One function for 4 MiB asks on arrival
# whether a tensor has a graph at its sender. A list of tensors goes by C pickle, which calls a
# function for each tensor; writing and reading takes less time than the loop it replaces. A lambda
# is taken apart at the caller, and made again at the callee; its code has travelled before. 200 KiB
# are read at once, as one tensor is: no other thread is woken for the rest of the message. A hop
# is a call, a backward pass and the end of their context; a training step also steps an optimizer.
# At the callee a hop took up to 196.4 at times, with a limit of 196; the cause is not known.
FUNCTIONS = {
    "nothing": (38, 42),
    # Counting replaces one function at the caller, and adds one at the callee.
    "nothing, observed": (38, 43),
    # A trace notes the call when it is made and when it ends, and each message, on both sides.
    "nothing, traced": (42, 47),
    "a lambda": (52, 49),
    "one tensor": (42, 44),
    "sixteen tensors": (68, 69),
    "a tensor in a context": (76, 73),
    "200 KiB of bytes": (39, 42),
    "4 MiB": (115, 120),
    # Each message of a pass is checked before it is taken: see docs/security/members.md.
    "a hop of backward": (244, 202),
    "a training step": (308, 331),
}
# One at the caller and three at the callee are for deadlines and cancelling: which call the code
# serves, and when a call arrived. In a context, one on each side counts the earlier messages sent,
# by which a pass for certain tensors knows where it need not go. One at the caller asks whether
# gradients are wanted: a remote result under no_grad must not look as if it had a graph. Another
# one at the caller, and two at the callee in a context, were Python functions before: the current
# context is a context variable. Some look at the sizes of a message's parts, which all messages
# have: they call ``len``, at 40 ns. The arguments of a remote module are read in a loop, not by C
# pickle: two functions in C for each, and twelve fewer of Python. One at the caller asks for
# inference mode, in which an answer must not be read. Two at the caller ask for modes of PyTorch,
# under which operations do something else than they say, before an answer is read, and three ask
# for modes and transforms before tensors are sent. The callee has three fewer: a call leaves
# nothing to be reset, as each has a Python context of its own.
FUNCTIONS_IN_C = {
    "nothing": (51, 54),
    "nothing, observed": (54, 56),
    "nothing, traced": (65, 72),
    "a lambda": (76, 63),
    "one tensor": (66, 65),
    "sixteen tensors": (278, 275),
    "a tensor in a context": (92, 85),
    "200 KiB of bytes": (58, 58),
    "4 MiB": (157, 164),
    "a hop of backward": (297, 273),
    "a training step": (367, 416),
}
# The caller is the main thread. It may be interrupted, so it sends and receives in one step of
# Python each, and a profile function does not see these two calls. That takes 350 bytes for a
# moment; every thread that sends checks whether it is the main thread. An object for each claim of
# a connection, which a signal handler may take away, is 60 bytes more.
SYSTEM_CALLS = {"caller": 2.1, "callee": 4.1}
# A hop and a training step send so many messages, and a last one that ends the context.
MESSAGES = {"a hop of backward": 2, "a training step": 3}
BYTES_OF_PYTHON = {
    "nothing": 1_210,
    "a lambda": 1_370,
    "one tensor": 1_250,
    "sixteen tensors": 16_000,
    "a tensor in a context": 2_450,
    "4 MiB": 10_000,
    "a hop of backward": 9_900,
    "a training step": 9_600,
}
BYTES_THROUGH_SOCKETS = {
    "nothing": 117,
    "a lambda": 114,
    "one tensor": 167,
    "sixteen tensors": 1_190,
    "a tensor in a context": 167,
    "4 MiB": 316,
    "a hop of backward": 399,
    "a training step": 595,
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The counts, by kind of call."""
    store = tmp_path_factory.mktemp("counting") / "store"
    # How often a spinning thread polls, and how often the timer thread ticks, depends on time.
    still = overridden(SPIN_S=0, REARM_S=60, STALL_S=60)
    environment = {**os.environ, **still, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.counting", str(rank), str(store)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        report, _ = workers[0].communicate(timeout=LIMIT_S)
        workers[1].communicate(timeout=LIMIT_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0]
    return json.loads(report)


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_functions_of_python(counted: Any, kind: str) -> None:
    found = [counted[kind][side]["functions"] for side in ("caller", "callee")]
    assert found[0] <= FUNCTIONS[kind][0], found
    assert found[1] <= FUNCTIONS[kind][1], found


@pytest.mark.parametrize("kind", list(FUNCTIONS_IN_C))
def test_functions_in_c(counted: Any, kind: str) -> None:
    found = [counted[kind][side]["functions in C"] for side in ("caller", "callee")]
    assert found[0] <= FUNCTIONS_IN_C[kind][0], found
    assert found[1] <= FUNCTIONS_IN_C[kind][1], found


@pytest.mark.parametrize("kind", list(FUNCTIONS))
@pytest.mark.parametrize("side", ["caller", "callee"])
def test_system_calls(counted: Any, kind: str, side: str) -> None:
    count = MESSAGES.get(kind, 1)
    if side == "callee" and kind in MESSAGES:
        count += 1
    assert counted[kind][side]["system calls"] <= SYSTEM_CALLS[side] * count, counted[kind][side]


@pytest.mark.parametrize("kind", list(BYTES_OF_PYTHON))
def test_memory(counted: Any, kind: str) -> None:
    assert counted[kind]["caller"]["bytes of Python"] <= BYTES_OF_PYTHON[kind]


@pytest.mark.parametrize("kind", list(BYTES_THROUGH_SOCKETS))
def test_bytes_copied_through_sockets(counted: Any, kind: str) -> None:
    assert counted[kind]["caller"]["bytes through sockets"] <= BYTES_THROUGH_SOCKETS[kind]
