from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from torchweft.rpc.observed import write_report_on_signal


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


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("former", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_that_nobody_handles_is_answered(former: signal.Handlers) -> None:
    signal.signal(signal.SIGQUIT, former)
    write_report_on_signal()
    ours = signal.getsignal(signal.SIGQUIT)
    assert callable(ours)
    write_report_on_signal()
    assert signal.getsignal(signal.SIGQUIT) is ours
