from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import train
from interrupt import Interrupt


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "{tmp}/missing"], "cannot be read: No such file"),
        (["--data", "{tmp}"], "is not a file"),
        (["--data", "{tmp}/empty"], "is empty"),
        (["--batch", "100000"], "too small"),
        (["--resume", "{tmp}/missing"], "cannot be read: No such file"),
        (["--resume", "{tmp}/empty"], "is not a state"),
        (["--out", "{tmp}/empty/folder"], "cannot be made: Not a directory"),
    ],
)
def test_unusable_input_gives_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (tmp_path / "empty").touch()
    out = ["--out", str(tmp_path / "out")]
    status = train.main(out + [argument.format(tmp=tmp_path) for argument in arguments])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: ")
    assert complaint in error
    assert error.count("\n") == 1


def press_ctrl_c_twice(interrupt: Interrupt) -> None:
    with interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_requested
        os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_in_a_stuck_step(interrupt: Interrupt) -> None:
    with interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(timeout=30)


@pytest.mark.parametrize("press", [press_ctrl_c_twice, press_ctrl_c_in_a_stuck_step])
def test_the_first_ctrl_c_asks_and_what_does_not_end_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, press: Callable[[Interrupt], None]
) -> None:
    monkeypatch.setattr("interrupt.PATIENCE_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        press(Interrupt())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_after_the_block_is_as_it_was_before() -> None:
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupt.is_requested
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
