from __future__ import annotations

import gc
import sys

import pytest

from tests.fuzz.auditing import add_hook
from tests.unit.engine.threads import test_interrupts


def test_a_hook_is_called_within_its_block_only() -> None:
    seen: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "weft.tried":
            seen.append(f"{event} {arguments}")
            raise PermissionError(event)

    watching = add_hook(watch)
    sys.audit("weft.tried", 1)
    for number in (2, 3):
        with watching(), pytest.raises(PermissionError, match="tried"):
            sys.audit("weft.tried", number)
        sys.audit("weft.tried", 4)
    assert seen == ["weft.tried (2,)", "weft.tried (3,)"]


def test_a_hook_that_does_not_watch_lets_no_other_thread_run() -> None:
    """Otherwise other threads would see the collector off, which is one step for them."""
    add_hook(lambda event, arguments: None)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        test_interrupts.test_a_collector_that_the_program_turns_off_stays_off()
    finally:
        sys.setswitchinterval(interval_s)
        gc.enable()
