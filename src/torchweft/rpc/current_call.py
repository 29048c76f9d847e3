"""The call that a function serves: how long its caller waits, and whether it still does.

The caller of a served function waits for a limited time. Nested calls have no more time than is
left, and end when the caller gives up.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from torchweft.agent.served_calls import current_call
from torchweft.protocol.calls import ServedCall


def remaining_time() -> float:
    """Returns how many seconds the caller of the running function still waits for it.

    Infinity if the caller waits without a limit, in a function that ``remote`` has called, and
    outside of served calls. Threads that a function starts do not inherit its call; asyncio tasks
    do, and so do callbacks of the futures of its calls.
    """
    call = serving()
    return math.inf if call is None else call.remaining_s(time.monotonic())


def is_cancelled() -> bool:
    """Returns whether the running function's caller no longer waits, so that it may end.

    True if the caller has cancelled the call, has no time left, or is lost. After ``remote``: if
    the caller is lost and no other reference to the value exists. False outside of served calls.
    """
    call = serving()
    return call is not None and call.notice_unwanted(time.monotonic())


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Separates calls within the block from the call that the running function serves.

    They have their own time limits, and go on when the caller has given up. Use it for cleanup
    that must run even then, or for work that goes on after the function has returned.
    """
    token = current_call.set(None)
    try:
        yield
    finally:
        current_call.reset(token)


def serving() -> ServedCall | None:
    """Returns the call that the running code serves; None without a call or after its answer."""
    call = current_call.get()
    return call if call is not None and call.is_current else None
