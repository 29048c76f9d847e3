from __future__ import annotations

import pytest

from torchweft.engine.threads.reports import LongWaits, OpenWait


def test_a_long_wait_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    open_waits = [OpenWait("first", 100.0, lambda: "in barrier for worker 'b'")]
    waits = LongWaits("a")
    waits.add(lambda: open_waits)
    assert waits.tick(109.9) == 110.0
    assert not caplog.messages
    assert waits.tick(110.0) > 1e9
    waits.tick(120.0)
    (message,) = caplog.messages
    assert message.startswith("worker 'a' has waited ")
    assert message.endswith(" s in barrier for worker 'b'")
    open_waits[:] = [OpenWait("second", 119.0, lambda: "in barrier for worker 'c'")]
    waits.tick(129.0)
    assert [message[-3:] for message in caplog.messages] == ["'b'", "'c'"]
