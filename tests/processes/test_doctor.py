"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import torchweft
from tests.command_line import said_by
from tests.contract.processes import deadlocks
from tests.contract.processes.functions import options, stop
from torchweft import rpc
from torchweft.launch import Nursery
from torchweft.observe.examining import read_time

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


def examined(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the findings of the command by their checks."""
    status, out, err = said_by("doctor", "--group", *arguments, "--json")
    assert out, err
    told = json.loads(out)
    assert status == (0 if told["is_well"] else 1)
    found: dict[str, list[dict[str, Any]]] = {}
    for each in told["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


def test_busy_and_stopped_workers_are_named_from_outside(nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    single = options(num_worker_threads=1)
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=single) as group:
        rpc.rpc_sync("worker1", read_time)
        call = rpc.rpc_async("worker0", deadlocks.read, args=(str(tmp_path / "pipe"),))
        with (tmp_path / "pipe").open("wb"):  # worker0 has begun to read it.
            found = examined(str(os.getpid()))
        levels = {each["where"]: (each["level"], each["text"]) for each in found["pair"]}
        assert levels["driver -> worker0"] == (
            "note",
            "is not measured, as worker0 is busy: no call ended within 1 s",
        )
        # Its slot is taken, and it measures nevertheless.
        assert levels["worker0 -> driver"][0] == levels["driver -> worker1"][0] == "ok"
        call.wait()
        stop(group.pids["worker1"])
        try:
            found = examined(str(os.getpid()))
        finally:
            os.kill(group.pids["worker1"], signal.SIGCONT)
        (stopped,) = found["worker"]
        assert (stopped["level"], stopped["where"]) == ("error", "worker1")
        assert "is stopped by a signal" in stopped["text"]
        assert not [each for each in found["pair"] if each["where"].endswith("-> worker1")]
