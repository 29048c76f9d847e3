"""Watches and repairs the sessions of one worker, as ``torchweft.protocol.connecting`` decides."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from torchweft.agent.peers import Peer
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.connecting import Action, Lose, Redial
from torchweft.protocol.greetings import failure_of
from torchweft.protocol.sessions import Rounds
from torchweft.runtime.reactor import Reactor
from torchweft.runtime.reports import log_exception
from torchweft.transport.keepalive import probe_interval_s
from torchweft.transport.link import LinkClosed
from torchweft.transport.resumable import ResumableLink

_log = logging.getLogger("torchweft")


class Contacts:
    """The sessions of one worker. Thread-safe.

    Args:
        detection_s: How long a peer may be silent.
        reactor: Provides the threads that dial.
        redial: Makes a new connection for a session; see ``Connector.redial``.
        lose: Declares a peer lost, with the cause.
        wake_by: Has ``tick`` called no later than a given time.
    """

    def __init__(
        self,
        detection_s: float,
        reactor: Reactor,
        redial: Callable[[Peer, ResumableLink], None],
        lose: Callable[[Peer, str], None],
        wake_by: Callable[[float], None],
    ) -> None:
        self._reactor = reactor
        self._redial = redial
        self._lose = lose
        self._wake_by = wake_by
        self._rounds = Rounds(detection_s, float(probe_interval_s(detection_s)))
        self._lock = threading.RLock()
        self._watched: dict[int, tuple[Peer, ResumableLink]] = {}

    # What happens to sessions

    def watch(self, peer: Peer, link: ResumableLink) -> None:
        """Watches a new session, unless it has ended already."""
        with self._lock:
            if peer.connecting.has_session:
                self._watched[peer.id] = peer, link
        self._wake_by(time.monotonic() + self._rounds.interval_s)

    def forget(self, peer: Peer) -> None:
        """Stops watching the session of a peer, if there is one: the session has ended."""
        with peer.state_lock:
            peer.connecting.end()
        with self._lock:
            self._watched.pop(peer.id, None)

    def on_break(self, peer: Peer, cause: str, *, is_answer: bool) -> None:
        """Handles the end of a session's connection: redials, or declares the peer lost."""
        with peer.state_lock:
            is_news = not peer.connecting.is_broken
            actions = peer.connecting.broke(time.monotonic(), cause, is_answer=is_answer)
            is_news &= peer.connecting.is_broken
        if is_news:
            _log.info("the connection to worker %r broke: %s; it is made again", peer.name, cause)
        # Do not leave this to the timer thread: callers wait for every millisecond of a break.
        for action in actions:
            if isinstance(action, Lose):
                self._lose(peer, action.cause)
            else:
                self._act(peer, [action])

    def on_resumed(self, peer: Peer, link: ResumableLink) -> None:
        """Records that a session has a connection again."""
        with peer.state_lock:
            peer.connecting.resumed(time.monotonic())
        _log.info("the connection to worker %r was made again", peer.name)
        link.report_break("end of file")  # Race: it may have broken before ``resumed`` was noted.

    def silence_s(self, peer: Peer) -> float:
        """Returns the seconds since a peer was last heard; 0 without a session."""
        now_s = time.monotonic()
        if peer.id in self._watched:
            self._listen(*self._watched[peer.id], now_s)
        return peer.connecting.silence_s(now_s)

    # What is due

    def tick(self, now_s: float) -> float:
        """Updates when each peer was last heard, and performs due actions; a timer job."""
        with self._lock:
            watched = list(self._watched.values())
        due_s = math.inf
        must_acknowledge = bool(watched) and self._rounds.must_acknowledge(now_s)
        for peer, link in watched:
            try:
                if self._rounds.must_prompt(self._listen(peer, link, now_s)):
                    link.prompt()
                due_s = min(due_s, self._look_at(peer, now_s))
                if must_acknowledge:
                    link.acknowledge()
            except Exception:  # The other sessions are looked after nevertheless.
                log_exception("the session with worker %r could not be looked after", peer.name)
        return min(due_s, self._rounds.acknowledge_at_s) if watched else math.inf

    def _look_at(self, peer: Peer, now_s: float) -> float:
        """Performs the due actions of one session; returns when to look again."""
        with peer.state_lock:
            actions = peer.connecting.step(now_s)
            due_s = min(peer.connecting.due_s(), now_s + self._rounds.interval_s)
        self._act(peer, actions)
        return due_s

    def _listen(self, peer: Peer, link: ResumableLink, now_s: float) -> float:
        """Notes when the peer was last heard; returns the seconds since then, 0 if unknown."""
        silence_s = link.silence_s()
        if silence_s is None:
            return 0.0
        with peer.state_lock:
            peer.connecting.heard(now_s - silence_s)
        return silence_s

    # Actions

    def _act(self, peer: Peer, actions: list[Action]) -> None:
        """Leaves actions to other threads: they take too long for the timer thread."""
        for action in actions:
            if isinstance(action, Redial):
                self._reactor.submit(self._dial, peer)
            else:
                self._reactor.submit(self._give_up, (peer, action.cause))

    def _give_up(self, peer_and_cause: tuple[Peer, str], _: object) -> None:
        self._lose(*peer_and_cause)

    def _dial(self, peer: Peer, _: object) -> None:
        """Makes a new connection for a session, or asks the peer to; blocks for a while."""
        link = peer.link
        assert isinstance(link, ResumableLink)
        try:
            with self._reactor.idling():
                self._redial(peer, link)
        except LinkClosed:
            return
        except (OSError, ProtocolError, ConfigurationError) as error:
            failure, cause = failure_of(error), str(error)
        else:
            return
        link.report_break(cause)
        now_s = time.monotonic()
        with peer.state_lock:
            actions = peer.connecting.redial_failed(now_s, failure, cause)
        self._act(peer, actions)
        self._wake_by(self._look_at(peer, now_s))
