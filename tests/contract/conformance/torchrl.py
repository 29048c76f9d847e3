"""Runs torchrl's own RPC tests on Weft: ``python -m tests.contract.conformance.torchrl CHECKOUT``.

torchrl's wheels bring no tests along, and there is no source archive: CHECKOUT is a clone of its
repository at the version that is installed. The tests run unchanged, by pytest under
``python -m torchweft.compat``; ``--side torch`` runs them on PyTorch's implementation, to compare.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

DONE, WRONG, NOTHING_RUN = 0, 1, 2

TESTS = (
    (("test/rb/test_rb_distributed.py", "test/test_rb_distributed.py"), "test_funcs"),
    (("test/test_distributed.py",), "TestRPCCollector"),
)
"""Where a file is, in newer and in older versions, and which of its tests use RPC."""

EXPECTED: Mapping[str, str] = {}
"""Tests that Weft is not meant to pass, each with the reason."""


class Ended(NamedTuple):
    """A test that has ended.

    Attributes:
        name: Its name, with its parameters.
        outcome: ``pass``, ``skip`` or ``fail``.
        seconds: How long it took.
        message: The first line of the error.
    """

    name: str
    outcome: str
    seconds: float
    message: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests and reports; returns the exit code."""
    options = _parse(arguments)
    try:
        chosen = list(selection(options.checkout))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return NOTHING_RUN
    for line in differing_versions(options.checkout):
        print(line, file=sys.stderr)
    found: list[Ended] = []
    began_s = time.monotonic()
    for file, pattern in chosen:
        found += _run(options, file, pattern)
    for line in report(found, options.side):
        print(line)
    print(f"{time.monotonic() - began_s:.0f} s")
    if not found:
        return NOTHING_RUN
    return WRONG if any(is_wrong(each, options.side) for each in found) else DONE


def selection(checkout: Path) -> Iterator[tuple[Path, str]]:
    """Yields the files with RPC tests, each with the pattern of those tests.

    Raises:
        FileNotFoundError: The folder has no such file.
    """
    for places, pattern in TESTS:
        there = [checkout / place for place in places if (checkout / place).is_file()]
        if not there:
            raise FileNotFoundError(
                f"{checkout} has no {places[0]}: a clone of torchrl's repository is needed, at "
                f"version {version('torchrl')}"
            )
        yield there[0], pattern


def differing_versions(checkout: Path) -> Iterator[str]:
    """Yields a line if the clone is of another version than the package."""
    told, installed = checkout / "version.txt", version("torchrl")
    if told.is_file() and told.read_text().strip() != installed:
        yield f"tests of torchrl {told.read_text().strip()}, but {installed} is installed"


def read(path: Path) -> Iterator[Ended]:
    """Yields the tests in a report of pytest (``--junitxml``)."""
    for case in ElementTree.parse(path).iter("testcase"):
        wrong = [each for each in case if each.tag in ("failure", "error")]
        outcome = "fail" if wrong else "skip" if case.find("skipped") is not None else "pass"
        message = wrong[0].get("message", "").partition("\n")[0] if wrong else ""
        group = case.get("classname", "").rpartition(".")[2]
        name = f"{group}.{case.get('name')}"
        yield Ended(name, outcome, float(case.get("time", 0)), message)


def is_wrong(ended: Ended, side: str) -> bool:
    """Returns whether a test should have ended otherwise: a listed one must fail."""
    is_listed = side == "weft" and ended.name in EXPECTED
    return ended.outcome == ("pass" if is_listed else "fail")


def report(found: Sequence[Ended], side: str) -> Iterator[str]:
    """Yields a line for each test that did not pass, and one with the counts."""
    for each in found:
        if side == "weft" and each.name in EXPECTED and each.outcome == "fail":
            yield f"expected to fail: {each.name}: {EXPECTED[each.name]}"
        elif is_wrong(each, side):
            yield f"{each.outcome.upper()} {each.name} ({each.seconds:.1f} s) {each.message}"
    counts = Counter(each.outcome for each in found)
    texts = [f"{counts[outcome]} {outcome}" for outcome in ("pass", "fail", "skip")]
    yield f"torchrl {version('torchrl')} on {side}: {', '.join(texts)}"


def _run(options: argparse.Namespace, file: Path, pattern: str) -> list[Ended]:
    program = ["-m", "torchweft.compat"] if options.side == "weft" else []
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "report.xml")
        selected = [str(file), "-k", options.only or pattern, f"--junitxml={written}"]
        done = subprocess.run(
            [sys.executable, *program, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected],
            cwd=file.parent,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if not written.exists():
            return [Ended(f"{file.stem}.pytest", "fail", 0.0, f"exit status {done.returncode}")]
        return [each for each in read(written) if pattern in each.name]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contract.conformance.torchrl",
        description="Runs torchrl's own RPC tests, from a clone of its repository, on Weft.",
    )
    parser.add_argument("checkout", type=Path, help="the clone, at the version that is installed")
    parser.add_argument("--side", choices=("weft", "torch"), default="weft")
    parser.add_argument("--only", metavar="EXPRESSION", help="as -k of pytest")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
