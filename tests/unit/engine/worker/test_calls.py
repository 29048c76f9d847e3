from __future__ import annotations

import math
import threading

import pytest

from torchweft.engine.wire.frames import Frame
from torchweft.engine.worker.calls import PendingCall

LIMIT_S = 20.0


def new_call(timeout_s: float = math.inf) -> PendingCall:
    return PendingCall(1, "callee", "module:function", timeout_s)


def test_a_call_is_open_until_it_is_finished() -> None:
    call = new_call()
    assert not call.is_done
    assert call.frame is None
    assert not call.wait(0.0)
    assert not call.wait(-5.0)
    call.frame = Frame(4, 0, 1, b"", ())
    call.finish()
    assert call.is_done
    assert call.wait(0.0)
    assert call.wait(math.inf)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e30, threading.TIMEOUT_MAX + 1, 20.0])
def test_all_who_wait_are_woken(timeout_s: float) -> None:
    call = new_call()
    outcomes: list[bool] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(call.wait(timeout_s))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    call.finish()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outcomes == [True] * 4


def test_the_deadline_is_counted_from_the_start() -> None:
    call = new_call(5.0)
    assert call.deadline_s == call.started_s + 5.0
    assert 0.0 <= call.elapsed_s < 5.0
    assert new_call().deadline_s == math.inf
