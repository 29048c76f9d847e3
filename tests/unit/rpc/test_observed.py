from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.rpc import observed
from torchweft.rpc.observed import (
    inwards,
    lines,
    write_stacks_on_signal,
)
from torchweft.rpc.reporter import write_report_on_signal


@pytest.fixture
def default_handler() -> Iterator[None]:
    former = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGQUIT, former)


@pytest.mark.usefixtures("default_handler")
def test_a_handler_of_the_program_stays() -> None:
    def of_the_program(number: int, frame: FrameType | None) -> None:
        pass

    signal.signal(signal.SIGQUIT, of_the_program)
    write_report_on_signal()
    assert signal.getsignal(signal.SIGQUIT) is of_the_program


@pytest.fixture
def answered_signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the signals that would be answered, instead of answering them."""
    answered: list[int] = []
    monkeypatch.setattr(observed, "_answered", None)
    monkeypatch.setattr(faulthandler, "register", lambda number, **_: answered.append(number))
    return answered


def test_no_signal_is_one_as_well(answered_signals: list[int]) -> None:
    with knobs.STACKS_SIGNAL.override(""):
        write_stacks_on_signal()
    assert answered_signals == []


@pytest.mark.usefixtures("answered_signals")
def test_what_is_no_signal_is_refused() -> None:
    with (
        knobs.STACKS_SIGNAL.override("USR1"),
        pytest.raises(ConfigurationError, match="WEFT_STACKS_SIGNAL is 'USR1', which is no signal"),
    ):
        write_stacks_on_signal()


def test_a_strict_worker_tells_no_source_code() -> None:
    frames = inwards([sys._getframe()])
    with_source, without = (lines(frames, has_source)[-1] for has_source in (True, False))
    assert (
        with_source == f"{without}\n    frames = inwards([sys._getframe()])" or "\n" in with_source
    )
    assert "\n" not in without
    assert without.endswith(", in test_a_strict_worker_tells_no_source_code")
