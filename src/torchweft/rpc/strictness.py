"""What Weft's own entry points ask before they do something for others on a strict worker.

Others call an entry point with any plain values. So it checks types first, calls nothing that is
not registered, and touches only objects that were made for it. In a call of this worker to itself,
and on a worker that is not strict, nothing is refused here.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.served_calls import current_call
from torchweft.errors import ArgumentTypeError, NotAllowed
from torchweft.ids import ReferenceId
from torchweft.rpc.worker import current_worker


def strict_caller() -> Peer | None:
    """Returns the worker whose call this thread runs, if that is another one and this is strict."""
    served = current_call.get()
    if served is None or served.peer.is_self or not current_worker().reader.is_strict:
        return None
    caller: Peer = served.peer
    return caller


def serves_another_strictly() -> bool:
    """Tells whether this thread runs a call of another worker, on a worker that is strict."""
    return strict_caller() is not None


def check_called(function: Any) -> None:
    """Raises NotAllowed where a function in the arguments of a call may not be called."""
    if serves_another_strictly():
        current_worker().reader.check_called(function)


def check_types(**arguments: tuple[Any, type | tuple[type, ...]]) -> None:
    """Raises where arguments of an entry point are not of their types, subclasses included.

    Args:
        arguments: The value and the type of each argument, by its name.

    Raises:
        ArgumentTypeError: Another worker has sent something else.
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
        ArgumentTypeError: These are no three integers. A tensor would be taken apart, row by row.
    """
    if type(address) in (tuple, ReferenceId) and [type(each) for each in address] == [int] * 3:
        return ReferenceId(*address)
    raise ArgumentTypeError(f"a {type(address).__name__} was sent in place of a reference's number")


def refuse(what: str, why: str) -> NoReturn:
    """Raises NotAllowed for what a strict worker does not do for others."""
    name = current().info.name
    raise NotAllowed(
        f"worker {name!r} is strict and does not {what}: {why}", worker=name, refused=what
    )
