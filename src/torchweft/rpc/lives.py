"""Finds workers by id. An id names one life of a worker; a later life may reuse name and rank."""

from __future__ import annotations

from torchweft.agent.current import current
from torchweft.ids import WorkerInfo


def info_of(worker: int) -> WorkerInfo:
    """Returns the ``WorkerInfo`` of the worker with an id, as long as it lives.

    Raises:
        WorkerLost: The worker is lost. Another life of it may have its name by now.
    """
    peer = current().peers[worker]
    if peer.lost is not None:
        raise peer.lost_error()
    return peer.info
