from __future__ import annotations

import os
import signal
from collections.abc import Callable

from torchweft.launch.signals import NUMBERS, watched_signals


def test_signals_are_handled_in_the_loop_and_in_order() -> None:
    handlers: list[Callable[[], object]] = []
    heard: list[int] = []
    before = [signal.getsignal(number) for number in NUMBERS]
    with watched_signals(lambda descriptor, callback: handlers.append(callback), heard.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == []  # not where they struck
        (handle,) = handlers
        handle()
        assert heard == [signal.SIGTERM, signal.SIGINT]
    assert [signal.getsignal(number) for number in NUMBERS] == before
