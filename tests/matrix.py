"""Runs the quick tests on each Python and torch: ``make matrix``, or ``python -m tests.matrix``.

Rows are the newest torch on each Python from 3.10 to 3.14 that is there (on the path, or kept by
pyenv), the oldest torch that Weft claims on the oldest of these Pythons, and torch 2.13 on the
Python that runs this. Each row has an environment of its own, made by ``make`` and removed when the
row is done, as it takes up to 6 GB. Prints a table in Markdown; exits with 1 if a row failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".matrix"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
OLDEST_TORCH, CI_TORCH, NEWEST_TORCH = "torch==2.6.*", "torch==2.13.*", "torch"
LIMIT_S = 3600.0
_COUNTS = re.compile(r"=+ ((?:\d+ \w+(?:, )?)+) in [\d.]+s")
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/.*$", re.MULTILINE)
_VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


class Row(NamedTuple):
    """One combination: the version of Python, and the requirement for pip."""

    python: str
    torch: str

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return ENVIRONMENTS / f"{self.python}-{re.sub('[^0-9a-z.]+', '', self.torch).rstrip('.')}"

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return ENVIRONMENTS / f"{self.folder.name}.log"


def find_python(version: str) -> str | None:
    """Returns a Python of this version that can make an environment with pip in it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for candidate in (f"python{version}", *map(str, reversed(kept))):
        if shutil.which(candidate) and _runs([candidate, "-c", "import venv, ensurepip"]):
            return candidate
    return None


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def rows_for(pythons: list[str], own: str) -> list[Row]:
    """Returns the combinations to try, given the available versions and the running one."""
    first = [Row(pythons[0], OLDEST_TORCH)] if pythons else []
    return [*first, Row(own, CI_TORCH), *(Row(python, NEWEST_TORCH) for python in pythons)]


def counts_in(output: str) -> str:
    """Returns the counts in pytest's last line, such as ``12 passed, 1 skipped``."""
    found = _COUNTS.findall(output)
    return found[-1] if found else "no test ran"


def failures_in(output: str) -> list[str]:
    """Returns pytest's lines about the tests that failed, and why."""
    return _FAILED.findall(output)


def run(row: Row, interpreter: str) -> tuple[bool, str]:
    """Runs one row, and prints failures; returns whether it passed, and its line of the table."""
    environment, log = row.folder, row.log
    shutil.rmtree(environment, ignore_errors=True)
    ENVIRONMENTS.mkdir(exist_ok=True)
    make = ["make", f"VENV={environment.relative_to(ROOT)}", f"PYTHON={interpreter}"]
    began = time.monotonic()
    with log.open("w") as out:
        command = [*make, f"TORCH={row.torch}", "ARGS=", "quick"]
        status = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=out, timeout=LIMIT_S, check=False
        ).returncode
    seconds = time.monotonic() - began
    found = subprocess.run(
        [environment / "bin" / "python", "-c", _VERSIONS],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    python, torch = found or (row.python, f"{row.torch}, not installed")
    result = "passed" if status == 0 else f"FAILED, see {log.relative_to(ROOT)}"
    output = log.read_text(errors="replace")
    for failure in failures_in(output):
        print(failure, flush=True)
    counts = counts_in(output)
    return status == 0, f"| {python} | {torch} | {counts} | {seconds / 60:.0f} min | {result} |"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--only", help="rows with this in their folder's name, such as 3.12 or 2.6")
    options = parser.parse_args()
    own = ".".join(platform.python_version_tuple()[:2])
    found = {version: path for version in {*PYTHONS, own} if (path := find_python(version))}
    rows = rows_for([version for version in PYTHONS if version in found], own)
    rows = [row for row in rows if not options.only or options.only in row.folder.name]
    lines, all_passed = [], True
    for row in rows:
        print(f"python {row.python}, {row.torch}: {row.log.relative_to(ROOT)}", flush=True)
        has_passed, line = run(row, found[row.python])
        all_passed &= has_passed
        lines.append(line)
        if not options.keep:
            shutil.rmtree(row.folder, ignore_errors=True)
    print("\n| Python | torch | tests | time, set-up included | |\n|---|---|---|---|---|")
    print("\n".join(lines))
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
