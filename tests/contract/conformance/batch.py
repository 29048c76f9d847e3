"""Runs the tests named on its input and writes a line of JSON for each; see ``test_sample.py``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.contract.conformance import suite
from tests.contract.conformance.cases import CaseName
from tests.contract.conformance.running import Runner, default_jobs

NOT_INSTALLED = 3
"""The exit code if a package is missing; standard error says what to do."""


def main(logs: str, limit_s: str) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    cases = [CaseName.parse(line) for line in sys.stdin.read().split()]
    try:
        classes = suite.load(float(limit_s))
    except suite.NotInstalled as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    there = set(suite.catalogue(classes))
    _run(Runner(classes, Path(logs), default_jobs(), float(limit_s)), cases, there)
    return 0


def _run(runner: Runner, cases: Sequence[CaseName], there: set[CaseName]) -> None:
    for case in cases:
        if case not in there:
            _say(case, "missing", "")
    with contextlib.closing(runner.run([case for case in cases if case in there])) as results:
        for result in results:
            _say(result.case, result.outcome, str(result.log))


def _say(case: CaseName, outcome: str, log: str) -> None:
    print(json.dumps({"case": str(case), "outcome": outcome, "log": log}), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
