from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli import run
from weft.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Any, dict[str, Any]]]:
    """Collects what would be run."""
    made: list[tuple[list[str], Any, dict[str, Any]]] = []

    def run_workers(names: list[str], job: Any, **options: Any) -> int:
        made.append((names, job, options))
        return 7

    monkeypatch.setattr(run, "run_workers", run_workers)
    monkeypatch.setattr(run, "command_console", lambda: None)
    return made


Calls = list[tuple[list[str], Any, dict[str, Any]]]


def test_arguments_after_the_script_are_its_own(calls: Calls, script: str) -> None:
    status = main(["run", "-n", "2", script, "-n", "5", "--names", "x", "-m"])
    ((names, job, options),) = calls
    assert status == 7
    assert names == ["worker0", "worker1"]
    assert job["kind"] == "program"
    assert job["arguments"][0] == sys.executable
    assert job["arguments"][-6:] == [script, "-n", "5", "--names", "x", "-m"]
    assert options["master_port"] == 0


def test_names_say_how_many_workers(calls: Calls, script: str) -> None:
    main(["run", "--names", "ps,trainer0,trainer1", "--master-port", "4567", script])
    ((names, _, options),) = calls
    assert names == ["ps", "trainer0", "trainer1"]
    assert options["master_port"] == 4567


def test_a_module_is_run_as_one(calls: Calls) -> None:
    main(["run", "-n", "1", "--name-prefix", "trainer", "-m", "package.train", "--lr", "1"])
    ((names, job, _),) = calls
    assert names == ["trainer0"]
    assert job["arguments"][-4:] == ["-m", "package.train", "--lr", "1"]


def test_warm_workers_are_forked(calls: Calls, script: str) -> None:
    main(["run", "-n", "1", "--warm", script, "x"])
    main(["run", "-n", "1", "--warm", "-m", "module", "x"])
    assert [call[1] for call in calls] == [
        {"kind": "script", "path": script, "arguments": ["x"]},
        {"kind": "module", "module": "module", "arguments": ["x"]},
    ]
    assert all(call[2]["is_warm"] for call in calls)
