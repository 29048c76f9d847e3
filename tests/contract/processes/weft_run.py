"""Runs scripts with the command ``torchweft run``, as users do, and observes the outcome."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROMPT_S = 8.0
"""How soon everything must have ended after a Ctrl-C, also on a busy machine."""

LIMIT_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]


def running(directory: Path) -> Iterator[Start]:
    """Yields a function that starts ``torchweft run`` with a script; kills what is left."""
    started: list[subprocess.Popen[str]] = []

    def start_run(
        body: str, *options: str, count: int = 3, arguments: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        script = directory / "script.py"
        script.write_text("import os, signal, sys, time\n" + textwrap.dedent(body))
        command = [sys.executable, "-m", "torchweft", "run", "-n", str(count)]
        environment = {**os.environ, "NO_COLOR": "1"}
        process = subprocess.Popen(
            [*command, *options, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start_run
    for process in started:
        with process:
            process.kill()


def finish(
    process: subprocess.Popen[str], limit_s: float = LIMIT_S
) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out.splitlines(), err.splitlines()


def read_line(process: subprocess.Popen[str]) -> str:
    """Returns the next line that a worker prints, without the worker's name."""
    assert process.stdout is not None
    return process.stdout.readline().partition("]")[2].strip()


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """Returns the numbers that the workers print, which are then running."""
    return [int(pid) for _ in range(count) for pid in read_line(process).split()]


def is_running(pid: int) -> bool:
    """Returns whether a process is alive; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"still running after {limit_s} s: {alive}"
        time.sleep(0.01)
