from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.engine.worker.group import group_of
from torchweft.engine.worker import current
from torchweft.engine.worker.calls import current_call
from torchweft.errors import ShutdownError
from torchweft.mapreduce import ending


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom"), "its program raised ValueError: boom"),
        (ValueError("one\ntwo"), "its program raised ValueError: one"),
        (ValueError("x" * 300), f"its program raised ValueError: {'x' * 200}..."),
        (StopIteration(), "its program raised StopIteration"),
        (SystemExit(3), "its program called sys.exit(3)"),
        (SystemExit("no data"), "its program called sys.exit('no data')"),
        (KeyboardInterrupt(), "its program was interrupted"),
    ],
)
def test_why_a_worker_leaves_is_said_in_a_line(error: BaseException, expected: str) -> None:
    assert ending._describe(error) == expected


def test_who_says_that_its_program_failed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(3) as (me, other, third):
        monkeypatch.setattr(current, "here", me.agent)
        ending.failed("nobody said it")
        token = current_call.set(SimpleNamespace(peer=me.agent.me))  # type: ignore[arg-type]
        ending.failed("this worker said it")
        current_call.set(SimpleNamespace(peer=me.peer(other)))  # type: ignore[arg-type]
        ending.failed("its program raised ValueError: boom")
        current_call.reset(token)
        lost = me.peer(other).lost
        assert lost is not None
        assert lost.cause == "its program raised ValueError: boom"
        assert me.agent.me.lost is me.peer(third).lost is None
        monkeypatch.undo()


def test_torchrun_is_told_of_an_error_where_it_started_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def fail() -> None:
        with pytest.raises(ValueError, match="boom"), ending.recorded():
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
    monkeypatch.setattr(ending.time, "sleep", slept.append)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    else:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(ending, "shutdown", shutdown)
    monkeypatch.setattr(ending.os, "_exit", ends.append)
    with group_of(1) as (me,):
        monkeypatch.setattr(current, "here", me.agent)
        ending._leave(me.agent)
        assert slept == pauses
        monkeypatch.setattr(current, "here", None)
        ending._leave(me.agent)
    assert capsys.readouterr().err == f"weft: worker 'worker0': {said}\n"
    assert ends == []
    del sys._weft_exit_status  # type: ignore[attr-defined]
    assert ends == [status]
