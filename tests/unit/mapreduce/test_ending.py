from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.engine.worker.group import group_of
from torchweft.engine.worker import current
from torchweft.errors import ShutdownError
from torchweft.mapreduce import world


def test_torchrun_is_told_of_an_error_where_it_started_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def fail() -> None:
        with pytest.raises(ValueError, match="boom"), world.recorded():
            raise ValueError("boom")

    fail()
    assert not file.exists()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    fail()
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: boom"


@pytest.mark.parametrize(
    ("error", "launched", "status", "pauses", "said"),
    [
        (ShutdownError("worker 'worker1' is lost"), True, 1, [1.0], "worker 'worker1' is lost"),
        (ShutdownError("worker 'worker1' is lost"), False, 1, [], "worker 'worker1' is lost"),
        (
            KeyboardInterrupt(),
            True,
            130,
            [],
            "interrupted while it waited for the others to be done",
        ),
    ],
)
def test_a_worker_that_leaves_with_a_problem_says_it_and_exits_badly(
    error: BaseException,
    launched: bool,
    status: int,
    pauses: list[float],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shutdown() -> None:
        raise error

    ends: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(world.time, "sleep", slept.append)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    else:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(world, "shutdown", shutdown)
    monkeypatch.setattr(world.os, "_exit", ends.append)
    with group_of(1) as (me,):
        monkeypatch.setattr(current, "here", me.agent)
        world._leave(me.agent.me)
        assert slept == pauses
        monkeypatch.setattr(current, "here", None)
        world._leave(me.agent.me)
    assert capsys.readouterr().err == f"weft: worker 'worker0': {said}\n"
    assert ends == []
    del sys._weft_exit_status  # type: ignore[attr-defined]
    assert ends == [status]
