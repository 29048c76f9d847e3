"""The shell of ``torchweft.protocol.contact``: watches and mends the sessions of one worker."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from torchweft.agent.connector import Connector, Refused
from torchweft.agent.peers import Peer
from torchweft.agent.protection import Patience
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.contact import Contact, Step
from torchweft.transport.hearing import probe_interval_s
from torchweft.transport.link import LinkClosed
from torchweft.transport.resumable import ResumableLink

if TYPE_CHECKING:
    from torchweft.agent.agent import Agent

_log = logging.getLogger("torchweft")

_DIAL_LIMIT_S = 2.0
"""How long one attempt may take: the kernel's own patience with a silent network grows too fast."""
_LEAST_DIAL_LIMIT_S = 0.1
_ACKNOWLEDGE_S = 1.0


class _Watched:
    """One session, and what is known of the contact with its other side."""

    __slots__ = ("contact", "link", "peer")

    def __init__(self, peer: Peer, link: ResumableLink, contact: Contact) -> None:
        self.peer = peer
        self.link = link
        self.contact = contact


class Contacts:
    """The sessions of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
        connector: Dials.
        patience: How long contact with another worker may be lost.
    """

    def __init__(self, agent: Agent, connector: Connector, patience: Patience) -> None:
        self._agent = agent
        self._connector = connector
        self._patience = patience
        detection_s = patience.detection_s
        self._interval_s = min(float(probe_interval_s(detection_s)), detection_s / 5)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._acknowledge_at_s = math.inf

    # What happens to sessions

    def watch(self, peer: Peer, link: ResumableLink) -> None:
        """Watches a new session."""
        contact = Contact(time.monotonic(), *self._patience)
        with self._lock:
            self._watched[peer.id] = _Watched(peer, link, contact)
        self._nudge(time.monotonic() + self._interval_s)

    def forget(self, peer: Peer) -> None:
        """Watches a session no more: it has ended."""
        with self._lock:
            self._watched.pop(peer.id, None)

    def on_break(self, peer: Peer, link: ResumableLink, cause: str, *, is_answer: bool) -> None:
        """Takes note that the connection of a session has ended; mends it, unless that was it."""
        self._agent.links.pause(link)
        watched = self._watched.get(peer.id)
        if link.is_ending or watched is None:
            self._agent.lose(peer, cause)
            return
        with self._lock:
            is_news = not watched.contact.is_broken
            watched.contact.broke(time.monotonic(), cause, is_answer=is_answer)
        if is_news:
            _log.info("the connection to worker %r broke: %s; it is made again", peer.name, cause)
        # Not by the housekeeper: every millisecond of a break is one that somebody waits.
        self._look_at(watched, time.monotonic())

    def on_resumed(self, peer: Peer, link: ResumableLink) -> None:
        """Takes note that a session has a connection again."""
        watched = self._watched.get(peer.id)
        if watched is None:
            return
        with self._lock:
            watched.contact.resumed(time.monotonic())
        _log.info("the connection to worker %r was made again", peer.name)
        if link.is_broken:
            # It broke before this side had noted that it stands.
            self.on_break(peer, link, "end of file", is_answer=True)

    def silence_s(self, peer: Peer) -> float:
        """Returns for how long nothing was heard of a peer; 0 where there is no session."""
        watched = self._watched.get(peer.id)
        if watched is None:
            return 0.0
        now_s = time.monotonic()
        self._listen(watched, now_s)
        return max(0.0, watched.contact.silence_s(now_s))

    # What is due

    def tick(self, now_s: float) -> float:
        """Listens to all peers, and does what is due; a job of the housekeeper."""
        with self._lock:
            watched = list(self._watched.values())
        due_s = math.inf
        for each in watched:
            due_s = min(due_s, self._look_at(each, now_s))
        if watched and now_s >= self._acknowledge_at_s:
            for each in watched:
                each.link.acknowledge()
            self._acknowledge_at_s = now_s + _ACKNOWLEDGE_S
        elif watched and math.isinf(self._acknowledge_at_s):
            self._acknowledge_at_s = now_s + _ACKNOWLEDGE_S
        return min(due_s, self._acknowledge_at_s) if watched else math.inf

    def _look_at(self, watched: _Watched, now_s: float) -> float:
        """Does what is due for one session; returns when to look again."""
        self._listen(watched, now_s)
        contact = watched.contact
        with self._lock:
            step = contact.step(now_s)
            due_s = min(contact.due_s(), now_s + self._interval_s)
        if step is Step.DIAL:
            self._agent.reactor.submit(self._dial, watched)
        elif step is Step.GIVE_UP:
            # Not in the thread that looks at the clock: it is needed for what follows.
            lose = functools.partial(self._agent.lose, watched.peer, contact.cause)
            self._agent.reactor.submit(lambda *_: lose())
        return due_s

    def _listen(self, watched: _Watched, now_s: float) -> None:
        silence_s = watched.link.silence_s()
        if silence_s is not None:
            with self._lock:
                watched.contact.heard(now_s - silence_s)

    def _nudge(self, due_s: float) -> None:
        housekeeper = self._agent.housekeeper
        if housekeeper is not None:
            housekeeper.nudge(due_s)

    # Dialling

    def _dial(self, watched: _Watched, _: object) -> None:
        """Resumes a session, or asks the side that has dialled it to. Blocks for a moment."""
        peer, link, contact = watched.peer, watched.link, watched.contact
        is_final = is_there = False
        try:
            with self._agent.reactor.idling():
                # Where it is not, the session was resumed while this waited for its turn.
                if link.was_dialled:
                    with link.resuming:
                        if contact.is_dialling:
                            self._connector.resume(peer, link, self._timeout_s(link))
                elif contact.is_dialling:
                    self._connector.probe(peer, link, self._timeout_s(link))
                    with self._lock:
                        contact.dialled(time.monotonic())
            return
        except (Refused, ProtocolError, ConfigurationError) as error:
            cause, is_final = str(error), True
        except TimeoutError as error:
            cause, is_there = str(error), True
        except LinkClosed:
            return
        except OSError as error:
            cause = str(error)
        link.report_break(cause)
        now_s = time.monotonic()
        with self._lock:
            contact.dial_failed(now_s, cause, is_final=is_final, is_there=is_there)
        self._nudge(self._look_at(watched, now_s))

    def _timeout_s(self, link: ResumableLink) -> float:
        # Who listens and does not speak must be known to do so before it is given up.
        patience = self._patience
        patience_s = patience.reconnect_s if link.is_broken else patience.detection_s
        limit_s = max(patience_s / 4, _LEAST_DIAL_LIMIT_S)
        return min(self._connector.timeout_s, _DIAL_LIMIT_S, limit_s)
