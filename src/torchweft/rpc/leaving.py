"""A graceful shutdown, as the shell of ``torchweft.protocol.shutdown``."""

from __future__ import annotations

import logging
import math
import threading
import time

from torchweft.agent.peers import Peer
from torchweft.agent.waits import Following, Lacking, LongWaits
from torchweft.errors import ProtocolError, ShutdownError, WorkerLost
from torchweft.protocol.shutdown import Action, Closed, Leader, ProbeLater, Report, Send, Step
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

_log = logging.getLogger("torchweft")

_LEADER = 0
_PROBE_PAUSE_S = 0.005
_SETTLE_POLL_S = 0.002
_STEPS = frozenset(map(int, Step))
_LEAST_ARGUMENTS: dict[int, int] = {Step.PROBE: 1, Step.REPORT: 3}


class Leaving:
    """Takes one worker, and on rank 0 the group, through a graceful shutdown.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._agent = worker.agent
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._lost: dict[int, WorkerLost] = {}
        self._probe_at_s = math.inf
        self._has_settled = False
        self._notes_held = False
        self.held: list[str] = []
        """References of this worker that the program still had when the group had gone quiet."""
        ranks = set(self._agent.peers)
        self._leader = Leader(ranks) if self._agent.me.id == _LEADER else None
        self._agent.parts[Leaving] = self
        self._agent.on(Kind.SHUTDOWN, self._on_message, inline=True)

    def wait(
        self, timeout: float, *, notes_held: bool = False, follow: Following | None = None
    ) -> ShutdownError | None:
        """Blocks until the group has shut down, or cannot any more; returns what went wrong.

        Args:
            timeout: Seconds to wait at most; 0 for no limit.
            notes_held: Whether to note in ``held`` what is still used here when it is dropped.
            follow: Follows the wait; by default it is told of where it takes long.
        """
        self._notes_held = notes_held
        self._tell(Send(_LEADER, Step.READY))
        if self._leader is not None:
            self._agent.reactor.submit(self._watch_all)
        else:
            self._agent.reactor.submit(self._watch_leader)
        follow = follow or self._agent.part(LongWaits).during_shutdown
        with follow(self.lacking):
            is_done = self._done.wait(timeout or None)
        if not is_done:
            return self._late(timeout)
        if not self._lost:
            self._report_leaks()
            return None
        told = "; ".join(str(lost) for lost in self._lost.values())
        names = tuple(lost.worker for lost in self._lost.values())
        return ShutdownError(f"shut down without every worker: {told}", missing=names)

    def lacking(self) -> Lacking:
        """Returns who is waited for, and why."""
        if self._leader is None:
            leader = self._agent.peers[_LEADER].name
            return Lacking(f"worker {leader!r} has not said that all are done", (leader,))
        with self._lock:
            what, workers = self._leader.missing()
        names = tuple(self._agent.peers[worker].name for worker in workers)
        if not names:
            return Lacking("calls of the group had not ended")
        return Lacking(f"these {what}: {', '.join(map(repr, names))}", names)

    def _late(self, timeout: float) -> ShutdownError:
        """Returns the error of a shutdown that has no time left; says who is waited for."""
        lacking = self.lacking()
        return ShutdownError(
            f"graceful shutdown of worker {self._agent.info.name!r} took longer than "
            f"{timeout:.1f} s; {lacking.text}",
            missing=lacking.workers,
        )

    def _watch_all(self, _: object, __: object) -> None:
        """Connects to everybody: a worker that dies before it calls shutdown is then noticed."""
        with self._agent.reactor.idling():
            self._agent.connect_all(self._agent.peers.values(), self.peer_lost)

    def _watch_leader(self, _: object, __: object) -> None:
        with self._agent.reactor.idling():
            self._agent.connect_all([self._agent.peers[_LEADER]], self.peer_lost)

    # Messages

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        step, *arguments = decode_ints(frame.control, least=1)
        if step not in _STEPS or len(arguments) < _LEAST_ARGUMENTS.get(step, 0):
            raise ProtocolError(f"no shutdown message has step {step} and arguments {arguments}")
        if step == Step.PROBE:
            self._report(peer, arguments[0])
        elif step == Step.SETTLE:
            self._agent.is_leaving = True
            self._agent.reactor.submit(self._settle)
        elif step == Step.CLOSE:
            # The leader has others to tell first: it is done when it has told all.
            if self._leader is None:
                for rank in self._agent.peers.keys() & arguments:
                    self._note_lost(self._agent.peers[rank], "rank 0 says so")
                self._done.set()
        elif self._leader is None:
            raise ProtocolError(f"shutdown step {step} is for rank {_LEADER} only")
        else:
            self._lead(peer, Step(step), arguments)

    def _lead(self, peer: Peer, step: Step, arguments: list[int]) -> None:
        assert self._leader is not None
        with self._lock:
            if step is Step.READY:
                actions = self._leader.worker_ready(peer.id)
            elif step is Step.REPORT:
                probe_round, is_idle, activity = arguments[:3]
                report = Report(bool(is_idle), activity)
                actions = self._leader.worker_reported(peer.id, probe_round, report)
            else:
                actions = self._leader.worker_settled(peer.id)
        self._act(actions)

    def peer_lost(self, peer: Peer) -> None:
        """Goes on without a lost worker; without rank 0 it ends."""
        assert peer.lost is not None
        if self._leader is not None:
            self._lost[peer.id] = peer.lost
            with self._lock:
                actions = self._leader.worker_lost(peer.id)
            self._act(actions)
        elif peer.id == _LEADER:
            self._lost[peer.id] = peer.lost
            self._done.set()

    def peer_disconnected(self, peer: Peer) -> None:
        """Notes a closed connection after the group has gone quiet.

        Nobody leaves before the leader has told all that everybody has settled: who is gone
        earlier has died.
        """
        cause = "end of file during shutdown"
        if not self._has_settled:
            self._note_lost(peer, cause)
            self._worker.references.peer_lost(peer)
        if self._leader is None:
            if peer.id == _LEADER and not self._done.is_set():
                self._note_lost(peer, cause)
                self._done.set()
            return
        with self._lock:
            if self._leader.phase is Step.CLOSE:
                return
            actions = self._leader.worker_lost(peer.id)
        self._note_lost(peer, cause)
        self._act(actions)

    def _note_lost(self, peer: Peer, cause: str) -> None:
        peer.declare_lost(cause)
        assert peer.lost is not None
        self._lost[peer.id] = peer.lost

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._tell(action)
            elif isinstance(action, ProbeLater):
                self._probe_at_s = time.monotonic() + _PROBE_PAUSE_S
                if self._agent.housekeeper is not None:
                    self._agent.housekeeper.nudge(self._probe_at_s)
            elif isinstance(action, Closed):
                self._done.set()

    def _tell(self, action: Send) -> None:
        peer = self._agent.peers[action.to]
        self._agent.post_ints(peer, Kind.SHUTDOWN, action.step, *action.arguments)

    def tick(self, now_s: float) -> float:
        """Probes again when it is time; a job of the housekeeper."""
        if self._leader is None or self._probe_at_s > now_s:
            return self._probe_at_s
        self._probe_at_s = math.inf
        with self._lock:
            actions = self._leader.probe_again()
        self._act(actions)
        return self._probe_at_s

    # This worker's part

    def _report(self, leader: Peer, probe_round: int) -> None:
        reactor = self._agent.reactor
        is_idle = not (len(self._agent.calls) or reactor.busy or self._worker.unfinished)
        activity = reactor.activity + self._agent.calls.total
        self._tell(Send(leader.id, Step.REPORT, (probe_round, int(is_idle), activity)))

    def _settle(self, _: object, __: object) -> None:
        """Drops all references, and says so when every owner knows."""
        references = self._worker.references
        if self._notes_held:
            self.held = references.report_held()
        references.begin_settling()
        while not references.is_settled() and not self._agent.reactor.is_closing:
            time.sleep(_SETTLE_POLL_S)
            references.flush()
        self._has_settled = True
        self._tell(Send(_LEADER, Step.SETTLED))

    def _report_leaks(self) -> None:
        """Names what is left; nothing can be, once all workers have settled."""
        for line in self._worker.references.report_leaks():
            _log.warning("a reference was not released: %s", line)
