"""The calls of other workers, on the side of the one that is called: from arrival to end.

A caller that gives a call up says so, by its number. The call may then wait in its lane, run, or
have ended. So a call is known by its number from the moment at which it is read, and until it has
ended: what is cancelled is there, or it is over. Nothing has to be remembered for later.

What a served function calls in turn is *nested* in the call: it has no more time than is left,
and ends with it.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torchweft.agent.peers import Peer
from torchweft.errors import ProtocolError
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

if TYPE_CHECKING:
    from torchweft.agent.agent import Agent


class ServedCall:
    """One call of another worker.

    Args:
        peer: Who calls.
        frame: The request.
        arrived_s: When it was read.

    Attributes:
        function: What is called, or its name; empty until the request has been looked at.
        number: What the caller knows it by; 0 for one that nobody waits for.
        deadline_s: How long the caller waits; infinity until the request has been looked at.
        was_cancelled: Whether the caller has given it up, or is lost.
        has_ended: Whether it was answered, or is not to be answered.
        has_nested: Whether a call was made in its course.
    """

    __slots__ = (
        "_on_cancel",
        "arrived_s",
        "deadline_s",
        "frame",
        "function",
        "has_ended",
        "has_nested",
        "number",
        "peer",
        "was_cancelled",
    )

    def __init__(self, peer: Peer, frame: Frame, arrived_s: float) -> None:
        self.peer = peer
        self.number = frame.id
        self.function: bytes | Callable[..., Any] = b""
        self.frame: Frame | None = frame
        self.arrived_s = arrived_s
        self.deadline_s = math.inf
        self.was_cancelled = self.has_ended = self.has_nested = False
        self._on_cancel: Callable[[], object] | None = None
        if frame.id:
            if frame.id in peer.served:
                raise ProtocolError(f"two calls have the number {frame.id}")
            peer.served[frame.id] = self

    def end(self) -> None:
        """Notes that nothing more comes of it."""
        if self.number and not self.has_ended:
            del self.peer.served[self.number]
        self.has_ended = True
        self._on_cancel = None

    def cancel(self) -> None:
        """Notes that nobody waits for it. Runs no user code, and does not block."""
        self.was_cancelled = True
        on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Has ``callback`` called when it is cancelled, now if it was; perhaps twice."""
        self._on_cancel = callback
        if self.was_cancelled:
            callback()

    def is_unwanted(self, now_s: float) -> bool:
        """Whether nobody waits for it any more."""
        return self.was_cancelled or now_s > self.deadline_s or self.peer.lost is not None


current_call: ContextVar[ServedCall | None] = ContextVar("weft_served_call", default=None)
"""The call that the running code serves. Tasks of asyncio have that of who started them."""


class Cancelling:
    """Ends what other workers have given up.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._with_nested: deque[ServedCall] = deque()
        agent.on(Kind.CANCEL, self._on_message, inline=True)

    def cancel(self, calls: list[ServedCall]) -> None:
        """Cancels calls, and soon what is nested in them."""
        for call in calls:
            call.cancel()
            if call.has_nested:
                self._with_nested.append(call)
        # Later, for all that come meanwhile at once: it goes through all open calls.
        if self._with_nested:
            self._agent.reactor.submit(self._cancel_nested)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        found = map(peer.served.get, decode_ints(frame.control))
        self.cancel([call for call in found if call is not None])

    def peer_lost(self, peer: Peer) -> None:
        """Cancels the calls of a lost worker."""
        self.cancel(list(peer.served.copy().values()))

    def _cancel_nested(self, _: object, __: object) -> None:
        parents = set()
        with contextlib.suppress(IndexError):
            while True:
                parents.add(self._with_nested.popleft())
        if parents:
            self._agent.calls.cancel_nested(parents)
