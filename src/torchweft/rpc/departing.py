"""Leaving an open group, as the shell of ``torchweft.protocol.departure``."""

from __future__ import annotations

import math
import threading
import time

from torchweft.agent.admission import note_left
from torchweft.agent.peers import Peer
from torchweft.agent.waits import Following, Lacking, LongWaits
from torchweft.errors import NotInitialized, ShutdownError, WorkerLost
from torchweft.protocol.departure import Action, BeginSettling, Departure, Retire, Stage
from torchweft.protocol.shutdown import Send, Step
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

_POLL_S = 0.002


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
        self._departure = Departure()
        self._agent.parts[Departing] = self
        self._agent.on(Kind.SHUTDOWN, self._on_message, inline=True)
        self._agent.members.on_joined(self._on_member)

    def wait(self, timeout: float, *, follow: Following | None = None) -> ShutdownError | None:
        """Blocks until this worker can go; returns the reason if it could not go gracefully.

        Args:
            timeout: Seconds to wait at most; 0 for no limit.
            follow: Follows the wait; by default it is told of where it takes long.
        """
        end_s = time.monotonic() + timeout if timeout else math.inf
        follow = follow or self._agent.part(LongWaits).during_shutdown
        try:
            with follow(self._lacking):
                self._departure.begin()
                for peer in list(self._agent.peers.values()):
                    self._on_member(peer)
                while self._departure.stage is not Stage.LEFT:
                    if time.monotonic() > end_s:
                        return self._late(timeout)
                    if not self._observe():
                        time.sleep(_POLL_S)
        finally:
            note_left(self._store, self._place)
        return None

    def _observe(self) -> bool:
        """Tells the machine how this worker is doing; returns whether it went on."""
        agent, references = self._agent, self._worker.references
        is_settling = self._departure.stage is Stage.SETTLING
        if is_settling:
            references.flush()
        is_busy = len(agent.calls) or agent.reactor.busy or self._worker.unfinished
        with self._lock:
            actions = self._departure.observed(
                is_idle=not is_busy, is_settled=is_settling and references.is_settled()
            )
        self._act(actions)
        return bool(actions)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._agent.post_ints(self._agent.peers[action.to], Kind.SHUTDOWN, action.step)
            elif isinstance(action, Retire):
                peer = self._agent.peers[action.worker]
                peer.is_departing = True
                self._agent.members.retire(peer)
            elif isinstance(action, BeginSettling):
                self._worker.references.begin_settling()

    def _announce(self, peer: Peer, _: object) -> None:
        """Tells one worker, and connects to it first if need be."""
        try:
            with self._agent.reactor.idling():
                self._agent.connect(peer, math.inf)
            self._agent.post_ints(peer, Kind.SHUTDOWN, Step.LEAVING)
        except (WorkerLost, NotInitialized):
            self.peer_lost(peer)

    # The reasons for a wait

    def _lacking(self) -> Lacking:
        with self._lock:
            unanswered, stage = self._departure.unanswered, self._departure.stage
        if unanswered:
            names = tuple(self._agent.peers[worker].name for worker in unanswered)
            return Lacking(f"these have not answered: {', '.join(map(repr, names))}", names)
        if stage is Stage.SETTLING:
            return Lacking("references were not let go")
        return Lacking("calls had not ended")

    def _late(self, timeout: float) -> ShutdownError:
        name, lacking = self._agent.info.name, self._lacking()
        return ShutdownError(
            f"worker {name!r} left the group before it was done, after {timeout:.1f} s; "
            f"{lacking.text}",
            missing=lacking.workers,
        )

    # Events

    def _on_member(self, peer: Peer) -> None:
        if peer.is_self or peer.lost is not None:
            return
        with self._lock:
            actions = self._departure.member_present(peer.id)
        if actions:  # It is not among the agent's peers yet when it joins.
            self._agent.reactor.submit(self._announce, peer)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        step, *_ = decode_ints(frame.control, least=1)
        with self._lock:
            actions = self._departure.received(peer.id, step)
        self._act(actions)

    def peer_lost(self, peer: Peer) -> None:
        """Goes on without a lost worker."""
        with self._lock:
            self._departure.member_lost(peer.id)
