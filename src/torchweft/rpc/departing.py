"""Leaving an open group, while the others work on; see ``docs/protocols/membership.md``."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from torchweft.agent.admission import note_left
from torchweft.agent.peers import Peer
from torchweft.agent.waits import Following, Lacking, LongWaits
from torchweft.errors import NotInitialized, ProtocolError, ShutdownError, WorkerLost
from torchweft.protocol.shutdown import Step
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

_POLL_S = 0.002

_Stage = tuple[Callable[[], bool], Callable[[], Lacking]]
"""Whether it is over; and if not, what is lacking."""


class Departing:
    """Takes one worker out of an open group, and notes others that leave.

    Args:
        worker: The worker.
        store: The store of the group.
        place: Its place in the order of those who came.
    """

    def __init__(self, worker: Worker, store: object, place: int) -> None:
        self._worker = worker
        self._agent = worker.agent
        self._store = store
        self._place = place
        self._lock = threading.Lock()
        self._unnoted: set[int] = set()
        self._lacking: Callable[[], Lacking] = lambda: Lacking("nothing")
        self._agent.parts[Departing] = self
        self._agent.on(Kind.SHUTDOWN, self._on_message, inline=True)
        self._agent.on_lost(self._on_gone)

    def wait(self, timeout: float, *, follow: Following | None = None) -> ShutdownError | None:
        """Blocks until this worker can go; returns what kept it from going gracefully.

        Args:
            timeout: Seconds to wait at most; 0 for no limit.
            follow: Follows the wait; by default it is told of where it takes long.
        """
        end_s = time.monotonic() + timeout if timeout else None
        follow = follow or self._agent.part(LongWaits).during_shutdown
        try:
            with follow(lambda: self._lacking()):
                for is_done, lacking in self._stages():
                    self._lacking = lacking
                    while not is_done():
                        if end_s is not None and time.monotonic() > end_s:
                            return self._late(timeout, lacking())
                        time.sleep(_POLL_S)
        finally:
            note_left(self._store, self._place)
        return None

    def _stages(self) -> list[_Stage]:
        """Returns what is to be waited for, in order; each begins when the one before is done."""
        references = self._worker.references

        def settle() -> bool:
            references.flush()
            return references.is_settled() and not self._unnoted

        return [
            (self._announced(), self._who_has_not_noted),
            (self._is_idle, lambda: Lacking("calls had not ended")),
            (
                _after(references.begin_settling, settle),
                lambda: Lacking("references were not let go"),
            ),
        ]

    def _announced(self) -> Callable[[], bool]:
        # Also whoever joins from now on: it would call this worker, not knowing that it leaves.
        return _after(lambda: self._agent.members.on_joined(self._tell), lambda: not self._unnoted)

    def _tell(self, peer: Peer) -> None:
        if not peer.is_self and peer.lost is None and not peer.is_departing:
            with self._lock:
                self._unnoted.add(peer.id)
            self._agent.reactor.submit(self._announce, peer)

    def _announce(self, peer: Peer, _: object) -> None:
        """Tells one worker, and connects to it first if need be."""
        try:
            with self._agent.reactor.idling():
                self._agent.connect(peer, math.inf)
            self._agent.post_ints(peer, Kind.SHUTDOWN, Step.LEAVING)
        except (WorkerLost, NotInitialized):
            self._on_gone(peer)

    def _who_has_not_noted(self) -> Lacking:
        with self._lock:
            names = tuple(self._agent.peers[worker].name for worker in sorted(self._unnoted))
        return Lacking(f"these have not answered: {', '.join(map(repr, names))}", names)

    def _is_idle(self) -> bool:
        reactor, unfinished = self._agent.reactor, self._worker.unfinished
        return not (self._unnoted or len(self._agent.calls) or reactor.busy or unfinished)

    def _late(self, timeout: float, lacking: Lacking) -> ShutdownError:
        name = self._agent.info.name
        return ShutdownError(
            f"worker {name!r} left the group without grace, after {timeout:.1f} s; {lacking.text}",
            missing=lacking.workers,
        )

    # What others say

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        step, *_ = decode_ints(frame.control, least=1)
        if step == Step.LEAVING:
            peer.is_departing = True
            self._agent.members.retire(peer)
            self._agent.post_ints(peer, Kind.SHUTDOWN, Step.NOTED)
            self._on_gone(peer)  # It waits for no answer of its own any more, or will be lost.
        elif step == Step.NOTED:
            self._on_gone(peer)
        else:
            raise ProtocolError(f"shutdown step {step} is for closed groups")

    def _on_gone(self, peer: Peer) -> None:
        with self._lock:
            self._unnoted.discard(peer.id)


def _after(start: Callable[[], None], is_done: Callable[[], bool]) -> Callable[[], bool]:
    """Returns what calls ``start`` when it is first asked, and then asks ``is_done``."""
    started = False

    def ask() -> bool:
        nonlocal started
        if not started:
            started = True
            start()
        return is_done()

    return ask
