from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.contract.conformance import running
from tests.contract.conformance.cases import CaseName, Result
from tests.contract.conformance.running import Runner
from tests.contract.conformance.table import last_lines
from tests.tools.conformance import sample_case

# Forking warns because pytest-xdist has a thread; the child runs only a few lines.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def run(logs: Path, *tests: str, limit_s: float = 20, repeat: int = 1) -> dict[str, Result]:
    cases = [CaseName("own", "Sample", test) for test in tests]
    runner = Runner({"own.Sample": sample_case.Sample}, logs, jobs=2, limit_s=limit_s)
    return {result.log.name: result for result in runner.run(cases, repeat)}


def test_each_outcome_is_told_from_the_others(tmp_path: Path) -> None:
    results = run(tmp_path, "test_passes", "test_fails", "test_is_skipped", "test_dies")
    assert {name: result.outcome for name, result in results.items()} == {
        "own.Sample.test_passes.log": "pass",
        "own.Sample.test_fails.log": "fail",
        "own.Sample.test_is_skipped.log": "skip",
        "own.Sample.test_dies.log": "crash",
    }
    assert "a line of output" in (tmp_path / "own.Sample.test_passes.log").read_text()
    assert last_lines(tmp_path / "own.Sample.test_fails.log")[-1] == "AssertionError: 4 is not 5"


def test_one_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.0)
    results = run(tmp_path, "test_never_ends", "test_passes", limit_s=0.3)
    assert results["own.Sample.test_never_ends.log"].outcome == "timeout"
    assert results["own.Sample.test_passes.log"].outcome == "pass"


def test_what_a_test_leaves_running_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    results = run(tmp_path, "test_leaves_a_process")
    assert results["own.Sample.test_leaves_a_process.log"].outcome == "pass"
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
