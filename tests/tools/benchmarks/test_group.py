from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frame.group import ROOT, started_group
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import placements
from benchmarks.frame.run import parse_options
from tests.tools.benchmarks.example.question import (
    ECHO,
    QUESTION,
)

ANYWHERE = placements()["not pinned"]
ENDS_WITHIN_S = 20.0


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_processes_end_when_the_block_raises() -> None:
    pids = []

    def interrupted() -> None:
        with started_group(QUESTION, ECHO, ANYWHERE) as started:
            pids.extend(started.pids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 3
    assert not any(map(is_running, pids))


def test_stopped_processes_end_with_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-m", "tests.tools.benchmarks.example.hold"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for pid in map(int, output.split()):
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([watched], [], [], ENDS_WITHIN_S)[0], f"{pid} stays behind"
        finally:
            os.close(watched)


def test_rounds_alternate_and_failures_do_not_end_the_others() -> None:
    options = parse_options(QUESTION, ["--rounds", "2", "--works", "ask", "end"])
    rounds = measure(QUESTION, options, ANYWHERE)
    assert {key: len(each) for key, each in rounds.items()} == {
        ("echo", "ask"): 1,  # the work "end" ends the side in the first round
        ("alone", "ask"): 2,
    }
    assert options.failures == [
        "side broken: a process has ended",
        "end: side echo: a process has ended",
    ]
