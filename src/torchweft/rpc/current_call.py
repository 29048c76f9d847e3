"""The call that a function serves: how long its caller waits, and whether it still does.

A function that another worker has called has a caller that waits for it, for a limited time. What
it calls in turn has no more time than that, and ends when the caller gives up.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from torchweft.agent.calls import Named, function_name, late_with, orphan_error
from torchweft.agent.peers import Peer
from torchweft.agent.served_calls import ServedCall, current_call
from torchweft.errors import CallTimeout


def remaining_time() -> float:
    """Returns how many seconds the caller of the running function still waits for it.

    Infinity where it waits without a limit, in a function that ``remote`` has called, and where
    no other worker has called. Threads that a function starts know nothing of its call; tasks of
    asyncio do, and so do callbacks of the futures that it was given.
    """
    call = serving()
    return math.inf if call is None else max(call.deadline_s - time.monotonic(), 0.0)


def is_cancelled() -> bool:
    """Whether nobody waits for the running function any more, so that it may as well end.

    That is so where its caller has cancelled the call, has no time left, or is lost. After
    ``remote``: where the caller is lost and nobody else refers to the value. False where no other
    worker has called.
    """
    call = serving()
    if call is None or not call.is_unwanted(time.monotonic()):
        return False
    # Its time may be up here a moment before the caller notices. What a function that was told
    # this returns must not pass for its result.
    call.was_cancelled = True
    return True


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
    return None if call is None or (call.has_ended and not call.was_cancelled) else call


def nest(
    parent: ServedCall, peer: Peer, function: Named, limit_s: float
) -> tuple[ServedCall | None, float]:
    """Returns what a call made in the course of ``parent`` is part of, and how long it may take.

    Args:
        parent: The call that the running code serves.
        peer: Who is called.
        function: What is called.
        limit_s: How long the call may take at most.

    Raises:
        CallCancelled: The caller has given up.
        CallTimeout: The caller has no time left.
    """
    if parent.has_ended and not parent.was_cancelled:
        return None, limit_s
    parent.has_nested = True
    now_s = time.monotonic()
    left_s = parent.deadline_s - now_s
    if left_s < 0:
        name = function_name(function)
        raise CallTimeout(
            f"{name} on worker {peer.name!r} was not called: {late_with(parent)}",
            worker=peer.name,
            call=name,
        )
    if parent.is_unwanted(now_s):
        raise orphan_error(parent, peer.name, function)
    return parent, min(limit_s, left_s)
