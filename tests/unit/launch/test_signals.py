from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from torchweft.launch.signals import NUMBERS, AwaitedSignal, watched_signals


def test_signals_are_handled_in_the_loop_and_in_order() -> None:
    heard: list[int] = []
    before = [signal.getsignal(number) for number in NUMBERS]
    with selectors.DefaultSelector() as loop, watched_signals(loop, heard.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == []  # not in the signal handlers
        ((key, _),) = loop.select()
        key.data()
        assert heard == [signal.SIGTERM, signal.SIGINT]
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.fixture
def awaited() -> Iterator[AwaitedSignal]:
    former = signal.getsignal(signal.SIGUSR1)
    yield AwaitedSignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, former)


def test_a_signal_that_another_thread_gets_ends_the_wait(awaited: AwaitedSignal) -> None:
    # The signal does not interrupt the main thread, as if it came just before the wait.
    def strike() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    thread = threading.Thread(target=strike)
    thread.start()
    awaited.wait()
    thread.join()


def test_the_wait_is_for_that_signal_only(awaited: AwaitedSignal) -> None:
    heard = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))

    def strike() -> None:
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            time.sleep(0.05)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=strike)
    thread.start()
    awaited.wait()
    thread.join()
    signal.signal(signal.SIGUSR2, former)
    assert heard == [signal.SIGUSR2]
