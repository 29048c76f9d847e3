from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.frame.group import ROOT, Group, SideFailed, started_group
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import placements
from benchmarks.frame.run import parse_options
from tests.tools.benchmarks.example.question import (
    ASK,
    BROKEN,
    ECHO,
    END,
    QUESTION,
)

ANYWHERE = placements()["not pinned"]
ENDS_WITHIN_S = 20.0


def state_of(pid: int) -> str:
    """Returns the letter of a process's state: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def group() -> Iterator[Group]:
    with started_group(QUESTION, ECHO, ANYWHERE) as started:
        yield started


def test_side_stands_still_except_while_it_is_measured(group: Group) -> None:
    assert [state_of(pid) for pid in group.pids] == ["T"] * 3
    measured = group.measure(ASK, 5)
    assert [state_of(pid) for pid in group.pids] == ["T"] * 3
    # Two connections are asked in one run, so five operations take three runs.
    assert (len(measured.values), measured.operations) == (3, 2)
    assert measured.cpu_s > 0


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


def test_end_of_a_process_is_reported(group: Group) -> None:
    with pytest.raises(SideFailed, match="side echo: a process has ended"):
        group.measure(END, 1)


def test_side_that_cannot_start_tells_its_error() -> None:
    with pytest.raises(SideFailed, match=r"(?s)side broken.*ValueError: this side cannot start"):
        started_group(QUESTION, BROKEN, ANYWHERE).__enter__()


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


def test_row_whose_sides_tell_other_numbers_is_not_measured() -> None:
    options = parse_options(QUESTION, ["--rounds", "1", "--works", "same", "other"])
    rounds = measure(QUESTION, options, ANYWHERE)
    assert {name for _, name in rounds} == {"same"}
    assert len(options.failures) == 1
    assert "other: far: echo tells 2.0, but alone 2.1" in options.failures[0]
