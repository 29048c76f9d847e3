"""A sample of PyTorch's own RPC tests, a hundred quick ones of all their classes, run on Weft.

All of them run in one warm process beside this one, some at a time, so that each costs half a
second. A test here waits for its PyTorch test to end. ``make conformance`` runs the whole suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.contract.conformance.batch import NOT_INSTALLED
from tests.contract.conformance.cases import CaseName
from tests.contract.conformance.lists import Baseline, read_sample
from tests.contract.conformance.table import last_lines

LIMIT_S = 30.0

# PyTorch's tests run beside the tests here, so their shared memory may appear at any time.
pytestmark = pytest.mark.keeps("shared memory")


class Batch:
    """The process that runs the sample, and its results so far."""

    def __init__(self, cases: Sequence[str], logs: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.contract.conformance.batch",
            str(logs),
            str(LIMIT_S),
        ]
        environment = {**os.environ, "CONFORMANCE_SIDE": "weft"}
        with tempfile.TemporaryFile("w+") as names:
            names.write("\n".join(cases))
            names.seek(0)
            self.errors = (logs / "errors.log").open("w+")
            self.process = subprocess.Popen(
                command,
                stdin=names,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=environment,
                cwd=Path(__file__).parents[3],
            )
        self.said: dict[str, dict[str, str]] = {}

    def result_of(self, case: str) -> dict[str, str]:
        """Waits until a test has ended."""
        assert self.process.stdout is not None
        while case not in self.said:
            line = self.process.stdout.readline()
            if not line:
                pytest.fail(self._why_it_ended(), pytrace=False)
            said = json.loads(line)
            self.said[said["case"]] = said
        return self.said[case]

    def _why_it_ended(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        text = self.errors.read()
        return text if code == NOT_INSTALLED else f"the sample's runner ended with {code}:\n{text}"

    def close(self) -> None:
        """Ends the process, which ends its tests."""
        assert self.process.stdout is not None
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def batch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Batch]:
    """Runs the tests of the sample that are asked for."""
    wanted = [
        str(item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "batch" in item.fixturenames
    ]
    running = Batch(wanted, tmp_path_factory.mktemp("conformance"))
    yield running
    running.close()


@pytest.mark.parametrize("case", read_sample(), ids=str)
def test_of_pytorch_passes(case: CaseName, batch: Batch) -> None:
    result = batch.result_of(str(case))
    if result["outcome"] == "missing" and _another_torch():
        pytest.skip("this torch has no such test")
    shown = "\n".join(last_lines(Path(result["log"]), 40)) if result["log"] else ""
    assert result["outcome"] == "pass", f"{case}: {result['outcome']}\n{shown}"


def _another_torch() -> bool:
    import torch

    return torch.__version__.partition("+")[0] != Baseline.read().torch
