from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from torchweft.cli import run
from torchweft.cli.main import main
from torchweft.launch import Order, launchers
from torchweft.launch.restarts import RestartPolicy

Calls = list[Order]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Records runs instead of starting workers."""
    made: Calls = []

    def run_here(order: Order) -> int:
        made.append(order)
        return 7

    monkeypatch.setattr(launchers, "run_here", run_here)
    monkeypatch.setattr(run, "command_console", lambda: None)
    return made


def test_arguments_after_the_script_are_its_own(calls: Calls, script: str) -> None:
    status = main(["run", "-n", "2", script, "-n", "5", "--names", "x", "-m"])
    (order,) = calls
    assert status == 7
    assert order.names == ["worker0", "worker1"]
    assert order.job["kind"] == "program"
    assert order.job["arguments"][0] == sys.executable
    assert order.job["arguments"][-6:] == [script, "-n", "5", "--names", "x", "-m"]
    assert order.master_port == 0


def test_two_dashes_end_the_options(calls: Calls, script: str) -> None:
    main(["run", "-n", "2", "--", script, "--", "-x"])
    assert calls[0].job["arguments"][-3:] == [script, "--", "-x"]


def test_names_say_how_many_workers(calls: Calls, script: str) -> None:
    main(["run", "--names", "ps,trainer0,trainer1", "--master-port", "4567", script])
    (order,) = calls
    assert order.names == ["ps", "trainer0", "trainer1"]
    assert order.master_port == 4567


def test_a_module_is_run_as_one(calls: Calls) -> None:
    main(["run", "-n", "1", "--name-prefix", "trainer", "-m", "package.train", "--lr", "1"])
    (order,) = calls
    assert order.names == ["trainer0"]
    assert order.job["arguments"][-4:] == ["-m", "package.train", "--lr", "1"]


def test_warm_workers_are_forked(calls: Calls, script: str) -> None:
    main(["run", "-n", "1", "--warm", script, "x"])
    main(["run", "-n", "1", "--warm", "-m", "module", "x"])
    assert [call.job for call in calls] == [
        {"kind": "script", "path": script, "arguments": ["x"]},
        {"kind": "module", "module": "module", "arguments": ["x"]},
    ]
    assert all(call.is_warm for call in calls)


def test_workers_are_not_started_again_unless_asked_for(calls: Calls, script: str) -> None:
    main(["run", "-n", "1", script])
    assert calls[0].restarts == RestartPolicy(0)


def test_restarts_are_as_asked_for(calls: Calls, script: str) -> None:
    main(["run", "-n", "1", "--restarts", "3", script, "--restarts", "7"])
    timing = ["--backoff", "0.5", "--restart-window", "inf"]
    main(["run", "-n", "1", "--restarts", "5", "--restart", "worker", *timing, script])
    assert [call.restarts for call in calls] == [
        RestartPolicy(3, "group"),
        RestartPolicy(5, "worker", backoff_s=0.5, window_s=math.inf),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restart", "worker"], "say how many restarts there may be"),
        (["--backoff", "2"], "say how many restarts there may be"),
        (["--restarts", "-1"], "number of restarts is -1"),
        (["--restarts", "1", "--backoff", "-2"], "backoff_s of the restarts is -2.0"),
        (["--restarts", "1", "--restart-window", "0"], "window_s of the restarts is 0.0"),
        (
            ["--restarts", "1", "--restart", "worker", "--master-port", "4567"],
            "leave --master-port away",
        ),
    ],
)
def test_restarts_that_cannot_work_are_refused(
    options: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "1", *options, script]) == 2
    assert message in capsys.readouterr().err


def test_a_group_that_starts_again_has_no_fixed_place(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_INIT_METHOD", "file:///shared/store")
    assert main(["run", "-n", "1", "--restarts", "1", script]) == 2
    assert "but WEFT_INIT_METHOD names one; unset it" in capsys.readouterr().err


def test_a_seed_is_for_workers_that_are_forked(
    calls: Calls, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "1", "--warm", "--seed", "4", script]) == 7
    assert calls[0].seed == 4
    assert main(["run", "-n", "1", "--seed", "4", script]) == 2
    assert "--seed is for workers that are forked: add --warm" in capsys.readouterr().err
