"""Runs ``program.py`` on each side, one after the other."""

from __future__ import annotations

import compileall
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.group import ROOT, SideFailed
from benchmarks.frame.measuring import available, report_failure
from benchmarks.frame.placement import Cores

if TYPE_CHECKING:
    from benchmarks.frame.question import Question, Side

SIZE = 2
TIMEOUT_S = 120.0
PROGRAM = ("-m", "benchmarks.startup.program")
WITH_COMPAT = ("-m", "torchweft.compat")


def measure_programs(question: Question, options: Namespace, cores: Cores) -> Rounds:
    """Runs the program on all sides in turn; returns the rounds of the rows."""
    # Compile as an installer does; otherwise each process would compile the changed modules.
    compileall.compile_dir(ROOT / "src", quiet=1)
    rounds: dict[tuple[str, str], list[Round]] = defaultdict(list)
    sides = available(options.sides)
    for number in range(options.rounds):
        for side in sides[:: 1 if number % 2 else -1]:
            rows = [row for row in options.rows if side.name in (row.ours, row.torch)]
            if not rows:
                continue
            try:
                found = run_program(side, cores)
            except SideFailed as failure:
                report_failure(options, failure)
            else:
                for row in rows:
                    rounds[side.name, row.name].append(found[row.work_name])
    return rounds


def run_program(side: Side, cores: Cores) -> dict[str, Round]:
    """Runs the program once; returns wall time and CPU time until each of its stages.

    Raises:
        SideFailed: The program failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        cpu_before_s = _cpu_of_children_s()
        begin_s = time.monotonic()
        with _started(side, folder, cores) as processes:
            try:
                statuses = [process.wait(TIMEOUT_S) for process in processes]
            except subprocess.TimeoutExpired:
                statuses = [-signal.SIGKILL]
        end_s = time.monotonic()
        if any(statuses):
            said = Path(folder, "errors").read_text().splitlines()[-10:]
            raise SideFailed("\n".join([f"side {side.name}: exit statuses {statuses}", *said]))
        stages = json.loads(Path(folder, "stages").read_text())
        stages["end"] = (end_s, _cpu_of_children_s() - cpu_before_s)
        return {name: Round([at_s - begin_s], cpu_s) for name, (at_s, cpu_s) in stages.items()}


@contextlib.contextmanager
def _started(side: Side, folder: str, cores: Cores) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes; kills those that are left at the end of the block."""
    runner = WITH_COMPAT if side.name.endswith("compat") else ()
    processes: list[subprocess.Popen[bytes]] = []
    with open(Path(folder, "errors"), "wb") as errors:
        try:
            for rank in range(SIZE):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", *runner, *PROGRAM, side.api, str(rank)],
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        cwd=ROOT,
                        start_new_session=True,
                        preexec_fn=functools.partial(os.sched_setaffinity, 0, cores(rank)),
                        env={
                            **os.environ,
                            **side.environment,
                            "OMP_NUM_THREADS": "1",
                            "STARTUP_FOLDER": folder,
                        },
                    )
                )
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
