"""How a worker leaves its group: the shell of ``torchweft.protocol.membership.leaving``."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from torchweft.agent.peers import Peer
from torchweft.errors import ShutdownError
from torchweft.protocol.calls import has_awaited
from torchweft.protocol.membership.leader import ProbeLater, Report, Send, Step
from torchweft.protocol.membership.leaving import (
    Action,
    BeginSettling,
    ClosedLeaving,
    ExpectEnds,
    Left,
    Look,
    Lose,
    OpenLeaving,
    Retire,
    Watch,
)
from torchweft.protocol.membership.registration import LEADER
from torchweft.protocol.observing.keys import SHUTDOWN, Wait
from torchweft.rpc.worker import Worker
from torchweft.runtime.reports import Following, Lacking, LongWaits, names_of
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_step, encode_texts

_log = logging.getLogger("torchweft")

_PROBE_PAUSE_S = 0.005
_POLL_S = 0.002
_CAUSE_LENGTH = 512
_SIGNAL_S = 1.0
"""The longest wait: it delays the handler of a signal that arrived just before it began."""


class Leaving:
    """Takes one worker out of its group, and does its part while others leave. Thread-safe.

    Args:
        worker: The worker.
        waits: Logs a wait that takes long.
        on_settling: Called when no worker needs this one any more, before another one may leave.
        on_left: Called when the wait for leaving has ended, successfully or not.
    """

    def __init__(
        self,
        worker: Worker,
        waits: LongWaits,
        on_settling: Callable[[], None] = lambda: None,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._agent = agent = worker.agent
        self._waits = waits
        self._on_settling = on_settling
        self._on_left = on_left
        self._lock = threading.Lock()
        self._machine = (
            OpenLeaving() if agent.members.is_open else ClosedLeaving(agent.me.id, set(agent.peers))
        )
        self._changed = threading.Event()
        self._probe_at_s = math.inf
        self._timer = worker.agent.timers.add(self.tick)
        self._is_settling_due = self._is_settling = False
        self._notes_held = False
        self._left: Left | None = None
        self._causes: dict[int, str] = {}  # Of the workers that rank 0 knows to be lost.
        self.held: list[str] = []
        """Lines that name the references which the program still held when they were dropped."""
        agent.receiver.on(Kind.SHUTDOWN, self._on_message, inline=True)
        agent.members.on_joined(self._on_member)

    def wait(
        self, timeout: float, *, notes_held: bool = False, follow: Following | None = None
    ) -> ShutdownError | None:
        """Blocks until this worker may leave, or the time is up; returns the error, if any.

        Args:
            timeout: Seconds to wait at most; 0 for no limit.
            notes_held: Whether to record in ``held`` the references that are dropped while in use.
            follow: Follows the wait; by default a long wait is logged.
        """
        self._notes_held = notes_held
        began_s = time.monotonic()
        end_s = began_s + timeout if timeout else math.inf
        follow = follow or self._waits.during_shutdown
        try:
            with follow(self.lacking):
                self._feed(self._machine.begin)
                for peer in list(self._agent.peers.values()):
                    self._on_member(peer)
                with self._agent.reactor.waiting(partial(self._shown, began_s)):
                    is_over = self._await_end(end_s)
                if not is_over:
                    return self._late(timeout)
        finally:
            self._on_left()
        return self._outcome()

    def _outcome(self) -> ShutdownError | None:
        assert self._left is not None
        lost = [self._agent.peers[worker].lost_error() for worker in self._left.lost]
        if not lost:
            self._report_leaks()
            return None
        told = "; ".join(map(str, lost))
        names = tuple(error.worker for error in lost)
        return ShutdownError(f"shut down without every worker: {told}", missing=names)

    def _await_end(self, end_s: float) -> bool:
        """Waits until the machine lets this worker leave; returns False if the time is up."""
        while self._left is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.clear()
            if self._is_settling_due:
                self._settle()
            if self._machine.is_watched:
                if not self._look():
                    self._changed.wait(min(_POLL_S, left_s))
            elif self._left is None:
                self._changed.wait(min(_SIGNAL_S, left_s))
        return True

    def _shown(self, began_s: float) -> list[Wait]:
        """Returns what the thread in ``wait`` waits for."""
        age_s, workers = time.monotonic() - began_s, self.lacking().workers
        return [] if self._left else [Wait(SHUTDOWN, "", age_s, "shutdown", workers)]

    def lacking(self) -> Lacking:
        """Returns the awaited workers, and the reason."""
        with self._lock:
            what, workers = self._machine.missing()
        names = tuple(self._agent.peers[worker].name for worker in workers)
        return Lacking(f"{names_of(names) if names else 'it'} {what}", names)

    def _late(self, timeout: float) -> ShutdownError:
        """Returns the error of a shutdown whose time is up; names the awaited workers."""
        lacking = self.lacking()
        return ShutdownError(
            f"graceful shutdown of worker {self._agent.info.name!r} took longer than "
            f"{timeout:.1f} s; {lacking.text}",
            missing=lacking.workers,
        )

    # Events

    def _feed(self, event: Callable[[], list[Action]]) -> bool:
        """Feeds an event to the machine and runs its actions; returns whether there were any."""
        with self._lock:
            actions = event()
        for action in actions:
            self._act(action)
        self._changed.set()
        return bool(actions)

    def peer_lost(self, peer: Peer) -> None:
        """Continues without a lost worker; a closed group ends if its leader is lost."""
        self._feed(lambda: self._machine.member_lost(peer.id))

    def peer_disconnected(self, peer: Peer) -> None:
        """Notes that a connection has ended after the group had gone quiet."""
        self._feed(lambda: self._machine.connection_ended(peer.id))

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        step, arguments, causes = decode_step(frame.control)
        if step == Step.CLOSE and peer.id == LEADER:
            self._causes = dict(zip(arguments, causes, strict=False))
        self._feed(lambda: self._machine.received(peer.id, step, arguments))

    def _on_member(self, peer: Peer) -> None:
        if peer.is_self or peer.lost is not None:
            return
        with self._lock:
            actions = self._machine.member_present(peer.id)
        for action in actions:
            assert isinstance(action, Send)
            self._tell(peer, action)  # Not ``_act``: the agent may not have the peer yet.
        if peer.lost is not None:  # Race: the machine may have heard of the loss too early.
            self.peer_lost(peer)

    def tick(self, now_s: float) -> float:
        """Makes the leader probe again when due; a job of the timers."""
        if self._probe_at_s <= now_s:
            self._probe_at_s = math.inf
            self._feed(self._machine.probe_again)
        return self._probe_at_s

    # Actions

    def _act(self, action: Action) -> None:
        agent = self._agent
        if isinstance(action, Send):
            self._tell(agent.peers[action.to], action)
        elif isinstance(action, Look):
            self._look()
        elif isinstance(action, ProbeLater):
            self._probe_at_s = time.monotonic() + _PROBE_PAUSE_S
            self._timer.wake_by(self._probe_at_s)
        elif isinstance(action, Retire):
            peer = agent.peers[action.worker]
            peer.depart()
            agent.members.retire(peer)
        elif isinstance(action, Watch):
            agent.reactor.submit(self._watch)
        elif isinstance(action, ExpectEnds):
            agent.lifetime.is_leaving = True
        elif isinstance(action, BeginSettling):
            self._is_settling_due = True  # The waiting thread does it, as it may take a while.
        elif isinstance(action, Lose):
            peer = agent.peers[action.worker]
            agent.leave_behind(peer, "end of file during shutdown")
            self._worker.references.peer_lost(peer)
        elif isinstance(action, Left):
            known = tuple(worker for worker in action.lost if worker in agent.peers)
            for worker in known:
                # Its session may be broken and not yet given up: it cannot read the farewell.
                cause = self._causes.get(worker)
                says = f"rank 0 says: {cause}" if cause else "rank 0 says so"
                agent.leave_behind(agent.peers[worker], says)
            self._left = Left(known)

    def _tell(self, peer: Peer, action: Send) -> None:
        step, arguments = action.step, action.arguments
        tail = b""
        if step is Step.CLOSE:
            tail = encode_texts([self._cause(worker) for worker in arguments])
        values = (step, len(arguments), *arguments)
        self._agent.sender.post_ints(peer, Kind.SHUTDOWN, *values, tail=tail)

    def _cause(self, worker: int) -> str:
        """Returns why a worker is lost, for the other workers: they may not have heard of it."""
        lost = self._agent.peers[worker].lost
        return (lost.cause or "")[:_CAUSE_LENGTH] if lost is not None else ""

    def _watch(self, _: object, __: object) -> None:
        """Connects to all workers, so that a death before ``shutdown`` is noticed."""
        with self._agent.reactor.idling():
            self._agent.connect_all(self._agent.peers.values(), self.peer_lost)

    def _look(self) -> bool:
        """Reports this worker's state to the machine; returns whether actions followed."""
        agent, references = self._agent, self._worker.references
        if self._is_settling:
            references.flush()
        is_idle = not (
            len(agent.calls)
            or agent.reactor.busy
            or self._worker.unfinished
            or has_awaited(list(agent.peers.values()))
        )
        report = Report(is_idle, agent.reactor.activity + agent.calls.total)
        is_settled = self._is_settling and references.is_settled()
        return self._feed(lambda: self._machine.observed(report, is_settled=is_settled))

    def _settle(self) -> None:
        """Drops all references."""
        self._is_settling_due = False
        self._on_settling()
        if self._notes_held:
            self.held = self._worker.references.report_held()
        self._worker.references.begin_settling()
        self._is_settling = True

    def _report_leaks(self) -> None:
        """Logs leaked references; a settled closed group should have none."""
        if not self._agent.members.is_open:
            for line in self._worker.references.report_leaks():
                _log.warning("a reference was not released: %s", line)
