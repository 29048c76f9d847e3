"""The other workers: which of them live, their health, and callbacks for their loss."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torchweft.engine.protocol.numbers import Tombstones
from torchweft.engine.protocol.registration import ENDED_LIMIT
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import WorkerLost
from torchweft.ids import WorkerInfo


class WorkerState(enum.Enum):
    """State of another worker, as seen from this worker."""

    SELF = "this worker"
    UNUSED = "no connection yet"
    CONNECTED = "connected"
    SILENT = "silent"
    """Its machine has not answered for half of ``detection_time``."""
    RECONNECTING = "reconnecting"
    """The connection broke, and is being made again."""
    LOST = "lost"


class WorkerHealth(NamedTuple):
    """Health of one worker, as seen from this worker.

    Attributes:
        worker: Name and rank.
        state: The worker's state.
        silence_s: Seconds since the worker or its machine was last heard; 0 if its end would be
            noticed at once, as on this host, or if there is no connection.
        error: Time and cause of the worker's loss; None if it is not lost.
    """

    worker: WorkerInfo
    state: WorkerState
    silence_s: float
    error: WorkerLost | None

    def __str__(self) -> str:
        text = f"{self.worker.name} (rank {self.worker.id}): {self.state.value}"
        if self.error is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(self.error.since))
            return f"{text} since {clock}: {self.error.cause}"
        return f"{text} for {self.silence_s:.1f} s" if self.silence_s >= 1 else text


def health() -> list[WorkerHealth]:
    """Returns the health of all known workers, by rank; sends nothing, never blocks.

    Includes lost workers until another worker takes their name; excludes departed workers.
    """
    agent = current()
    peers = sorted(agent.members.known(), key=lambda peer: peer.info.id)
    return [health_of(agent, peer) for peer in peers]


def on_worker_lost(callback: Callable[[WorkerLost], None]) -> Callable[[], None]:
    """Calls ``callback`` with the error of each lost worker, once each.

    It runs on a thread of this worker, after all waits for the lost worker have failed; at once
    for workers that are lost already, unless another worker has their name now. Its errors are
    logged. It also runs for a worker that leaves an open group gracefully: the ``cause`` is
    ``"left the group"``.

    Args:
        callback: Is called with a ``WorkerLost``, whose ``worker`` is the name.

    Returns:
        A function that removes the callback.

    Raises:
        NotInitialized: This process is in no group.
    """
    agent = current()
    replaced = agent.members.replaced()
    told = Tombstones(ENDED_LIMIT)
    lock = threading.Lock()

    def tell(peer: Peer) -> None:
        # Race: a worker lost during the registration is found by both ways below.
        with lock:
            is_news = peer.id not in replaced and peer.id not in told
            told.add(peer.id)
        if is_news:
            try:
                callback(peer.lost_error())
            except BaseException:
                log_exception("a callback for the loss of worker %r failed", peer.name)

    agent.on_lost(tell)
    for peer in list(agent.peers.values()):
        if peer.lost is not None:
            agent.reactor.submit(lambda lost, _: tell(lost), peer)
    return lambda: agent.off_lost(tell)


def health_of(agent: Agent, peer: Peer) -> WorkerHealth:
    """Returns the health of one worker; see ``health``."""
    if peer.is_self:
        return WorkerHealth(peer.info, WorkerState.SELF, 0.0, None)
    if peer.lost is not None:
        return WorkerHealth(peer.info, WorkerState.LOST, 0.0, peer.lost_error())
    link = peer.link
    if link is None:
        return WorkerHealth(peer.info, WorkerState.UNUSED, 0.0, None)
    silence_s = agent.links.silence_s(peer)
    state = WorkerState.CONNECTED
    if link.is_broken:
        state = WorkerState.RECONNECTING
    elif silence_s > agent.links.patience.detection_s / 2:
        state = WorkerState.SILENT
    return WorkerHealth(peer.info, state, silence_s, None)


def info_of(worker: int) -> WorkerInfo:
    """Returns the ``WorkerInfo`` of the worker with an id, as long as it lives.

    An id names one life of a worker; a later life may reuse name and rank.

    Raises:
        WorkerLost: The worker is lost. Another life of it may have its name by now.
    """
    peer = current().peers[worker]
    if peer.lost is not None:
        raise peer.lost_error()
    return peer.info
