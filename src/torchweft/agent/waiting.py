"""How a thread waits for messages of other workers.

In the native twin the waiting thread itself reads the connections on which they will come, unless
another thread already does. A message then needs no hand-over between threads. What arrives for
others is handed to the reactor. In the plain twin, threads of the reactor read everything, and the
waiting thread sleeps until one of them has put the message where it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from time import monotonic
from typing import Any, NamedTuple

from torchweft.agent.peers import Peer
from torchweft.native import native
from torchweft.runtime.reactor import Parts, Reactor
from torchweft.transport.native_link import NativeLink
from torchweft.wire.messages import Kind


class Spins(IntEnum):
    """For what a thread spins before it sleeps: each kind adapts to its own waits."""

    ANSWERS = 0
    PASSES = 2


class Wanted(NamedTuple):
    """The messages for which a thread waits.

    Attributes:
        kinds: A bit set of their kinds.
        number: The number in their frames.
        into: Gets them: a list, as pairs of peer and frame; or an object with a ``frame``.
        then: A task for the reactor that is due if this thread cannot go on with the message, as a
            signal handler has raised; None if there is none.
    """

    kinds: int
    number: int
    into: object
    then: tuple[Callable[..., None], Any, Any] | None = None


def kinds_of(*kinds: Kind) -> int:
    """Returns a bit set of kinds of messages."""
    return sum(1 << kind for kind in kinds)


class Waiter:
    """Lets threads of one worker wait for messages. Thread-safe.

    Args:
        reactor: Reads the connections that no waiting thread reads.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor

    def lease(self, peers: Sequence[Peer]) -> Any:
        """Returns the right to read the connections of workers; release it in any case.

        Take it before sending what will be answered, so that the answer wakes no other thread.

        Returns:
            The lease; None if another thread reads one of them, if there are many, or in the plain
            twin: then wait for other threads.
        """
        if native is None:
            return None
        links = []
        for peer in peers:
            link = peer.link
            if not isinstance(link, NativeLink):
                return None
            links.append(link.native)
        return native.Lease.take(tuple(links))

    def read(
        self,
        lease: Any,
        wanted: Wanted,
        spins: Spins,
        deadline_s: float,
        is_over: Callable[[], object],
        parts: Parts,
        wake_fd: int = -1,
    ) -> bool:
        """Reads until a wanted message is there; returns False if this thread is to wait otherwise.

        Args:
            lease: The right to read.
            wanted: The messages.
            spins: What the thread spins for.
            deadline_s: By the clock of ``time.monotonic``.
            is_over: Whether the wait has ended otherwise; asked now and then.
            parts: What the thread waits for, as ``Reactor.waiting`` takes it.
            wake_fd: An eventfd that has ``is_over`` asked; -1 for none.
        """
        taken = lease.wait(*wanted, spins, 0.0, wake_fd)
        if taken or is_over():
            return bool(taken > 0)
        with self._reactor.waiting(parts):
            while not taken and not is_over() and monotonic() < deadline_s:
                taken = lease.wait(*wanted, -1, deadline_s, wake_fd)
        return bool(taken > 0)
