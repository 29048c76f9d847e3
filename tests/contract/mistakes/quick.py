"""Runs the quick mistakes in forks of one warm process; prints their outcomes as JSON.

python -m tests.contract.mistakes.quick
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torchweft.nn
import torchweft.optim  # noqa: F401  (warm for the programs)
from tests.contract.mistakes import page
from tests.contract.mistakes.mistake import Mistake
from tests.contract.mistakes.running import Line, Outcome, find


def run_forked(mistake: Mistake) -> Outcome:
    """Runs a mistake in a fork of this process, and returns its outcome."""
    with tempfile.TemporaryDirectory(prefix="mistake-") as directory:
        (Path(directory) / "program.py").write_text(mistake.program)
        read_fd, write_fd = os.pipe()
        began_s = time.monotonic()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.close(read_fd)
            _run_here(directory, write_fd)
        os.close(write_fd)
        with open(read_fd) as pipe:
            lines = [Line(time.monotonic(), line.rstrip("\n")) for line in pipe]
        os.waitpid(pid, 0)
        return find(mistake, lines, began_s, directory)


def _run_here(directory: str, output_fd: int) -> NoReturn:
    os.chdir(directory)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    try:
        runpy.run_path("program.py", run_name="__main__")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    quick = [mistake for mistake in page.ALL if mistake.is_quick]
    print(json.dumps({mistake.title: run_forked(mistake)._asdict() for mistake in quick}))


if __name__ == "__main__":
    main()
