"""The call that a function serves: how long its caller waits, and whether it still does.

A function that another worker has called has a caller that waits for it, for a limited time. What
it calls in turn has no more time than that, and ends when the caller gives up.
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

    Infinity where it waits without a limit, in a function that ``remote`` has called, and where
    no other worker has called. Threads that a function starts know nothing of its call; tasks of
    asyncio do, and so do callbacks of the futures that it was given.
    """
    call = serving()
    return math.inf if call is None else call.remaining_s(time.monotonic())


def is_cancelled() -> bool:
    """Whether nobody waits for the running function any more, so that it may as well end.

    That is so where its caller has cancelled the call, has no time left, or is lost. After
    ``remote``: where the caller is lost and nobody else refers to the value. False where no other
    worker has called.
    """
    call = serving()
    return call is not None and call.notice_unwanted(time.monotonic())


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Has calls within the block not be part of the call that the running function serves.

    They have the time that they are given, and go on when the caller has given up: for what must
    be put in order even then, or is to go on after the function has returned.
    """
    token = current_call.set(None)
    try:
        yield
    finally:
        current_call.reset(token)


def serving() -> ServedCall | None:
    """Returns the call that the running code serves; None where there is none or it is answered."""
    call = current_call.get()
    return call if call is not None and call.is_current else None
