from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.cli import run
from torchweft.cli.main import main
from torchweft.launch import Order, launchers

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


def test_warm_workers_are_forked(calls: Calls, script: str) -> None:
    main(["run", "-n", "1", "--warm", script, "x"])
    main(["run", "-n", "1", "--warm", "-m", "module", "x"])
    assert [call.job for call in calls] == [
        {"kind": "script", "path": script, "arguments": ["x"]},
        {"kind": "module", "module": "module", "arguments": ["x"]},
    ]
    assert all(call.is_warm for call in calls)


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
