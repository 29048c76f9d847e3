"""Commands that tests start, with a limit on each wait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELLO = str(HERE / "hello.py")
LONG_TRAINING = str(HERE / "long_training.py")
SOURCE = str(HERE.parents[2] / "src")
LIMIT_S = 90.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Variables with which mpirun of Open MPI starts for this user."""
TORCHWEFT = (sys.executable, "-m", "torchweft")


def needed(command: str, package: str) -> str:
    """Returns the path of a command; skips the test where there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    found = shutil.which(command, path=path)
    if found is None:
        pytest.skip(f"there is no command {command!r} here (Debian: {package})")
    return found


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **(more or {})}


def finished(
    command: Sequence[str],
    more: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command,
        env=environment(more),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def started(
    command: Sequence[str],
    more: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    new_session: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, and kills it at the end."""
    process = subprocess.Popen(
        command,
        env=environment(more),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=new_session,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def joined(out: str) -> list[str]:
    """Returns the lines of ``hello.py``, without the names before them."""
    return sorted(line[line.index("joined") :] for line in out.splitlines() if "joined" in line)


def greetings(size: int) -> list[str]:
    return [f"joined worker{rank} of {size} {[1.0 + rank] * 2}" for rank in range(size)]
