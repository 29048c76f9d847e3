"""The benchmark of the parts of a call runs: it uses internals of Weft, which change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SHORT = """
import sys
import benchmarks.anatomy.__main__ as anatomy
anatomy.SERIES, anatomy.REPEATS, anatomy.CALLS = 1, 3, 5
sys.exit(anatomy.main())
"""


def test_every_part_of_a_call_is_timed() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "|" in line]
    assert (rows.count("caller"), rows.count("callee")) == (8, 6), done.stdout
    assert "a whole call, one core: median" in done.stdout
