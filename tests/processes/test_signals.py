"""Signal handlers and finalizers that raise or call, while the library is at work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import signal_programs
from tests.processes.signal_programs import PROGRAMS, RAISED, calling, collecting, raising

LIMIT_S = 150.0

OUTCOMES = {
    # But for finalizers and callbacks of weak references, where the interpreter drops them.
    raising: f"{RAISED} raised, {RAISED} arrived or were dropped in a finalizer, wrong: []",
    calling: "the handler has called",
    collecting: "0 threads wait",
}


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("native", ["auto", "0"])
def test_handlers_and_finalizers_may_raise_and_call(native: str) -> None:
    """One process for all programs, as it takes seconds to start."""
    ended = subprocess.run(
        [sys.executable, "-m", signal_programs.__name__],
        env={**os.environ, "WEFT_NATIVE": native, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = [
        f"{program.__name__} {work} {OUTCOMES[program]}"
        for program, works in PROGRAMS.items()
        for work in works
    ]
    assert ended.stdout.splitlines() == [*expected, "left"]
