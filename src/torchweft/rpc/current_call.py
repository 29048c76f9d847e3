"""The call that a function serves: its time limit, and the checks that a strict worker makes.

The caller of a served function waits for a limited time. Nested calls have no more time than is
left, and end when the caller gives up.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ArgumentTypeError, NotAllowed
from torchweft.ids import ReferenceId
from torchweft.rpc.worker import current_worker

TAKEN = object()
"""Returned to the server of calls in place of a result: a batch or a stream answers the call."""


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


# Checks that Weft's own entry points make before they act for other workers on a strict worker.
# Other workers call an entry point with any plain values. So it checks types first, calls only
# registered functions, and touches only objects that were made for it. In a call of this worker to
# itself, and on a worker that is not strict, nothing is refused here.


def strict_caller() -> Peer | None:
    """Returns the caller of the served call, if it is another worker and this worker is strict."""
    served = current_call.get()
    if served is None or served.peer.is_self or not current_worker().reader.is_strict:
        return None
    caller: Peer = served.peer
    return caller


def serves_another_strictly() -> bool:
    """Returns whether this thread runs a call of another worker, on a strict worker."""
    return strict_caller() is not None


def caller() -> Peer:
    """Returns the worker whose call is served; this worker where no call is."""
    served = current_call.get()
    if served is None:
        return current().me
    found: Peer = served.peer
    return found


def check_caller(names: Sequence[str], what: str) -> None:
    """Checks that a call comes from one of the workers that may make it.

    Args:
        names: Names of these workers.
        what: What they alone may do, after "may not".

    Raises:
        NotAllowed: Another worker calls; names it, and those that may.
    """
    found, me = caller().name, current().me.name
    if found not in names:
        raise NotAllowed(
            f"worker {found!r} may not {what} on worker {me!r}; that is for "
            f"{', '.join(map(repr, names))} alone",
            worker=me,
            refused=what,
        )


def check_called(function: Any) -> None:
    """Raises NotAllowed if a function in the arguments of a call may not be called."""
    if serves_another_strictly():
        current_worker().reader.check_called(function)


def check_types(**arguments: tuple[Any, type | tuple[type, ...]]) -> None:
    """Raises unless the arguments of an entry point have their types, or subclasses of them.

    Args:
        arguments: The value and the type of each argument, by its name.

    Raises:
        ArgumentTypeError: Another worker has sent an argument of another type.
    """
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(each.__name__ for each in kinds)
            raise ArgumentTypeError(
                f"{name} of a call of Weft's own is a {type(value).__name__}, not a {expected}"
            )


def reference_in(address: Any) -> ReferenceId:
    """Returns the reference whose number another worker has sent.

    Raises:
        ArgumentTypeError: Not three integers. Unpacking a tensor would take it apart row by row.
    """
    if type(address) in (tuple, ReferenceId) and [type(each) for each in address] == [int] * 3:
        return ReferenceId(*address)
    raise ArgumentTypeError(f"a {type(address).__name__} was sent in place of a reference's number")


def refuse(what: str, why: str) -> NoReturn:
    """Raises NotAllowed for an action that a strict worker refuses to other workers."""
    name = current().info.name
    raise NotAllowed(
        f"worker {name!r} is strict and does not {what}: {why}", worker=name, refused=what
    )
