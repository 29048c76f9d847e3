"""Workers by id. An id names one life of a worker; names and ranks pass on to the next one."""

from __future__ import annotations

from torchweft.agent.current import current
from torchweft.ids import WorkerInfo


def info_of(worker: int) -> WorkerInfo:
    """Returns what a call takes to reach the worker with an id, as long as it lives.

    Raises:
        WorkerLost: It is lost. Under its name there may be another life of it by now.
    """
    peer = current().peers[worker]
    if peer.lost is not None:
        raise peer.lost_error()
    return peer.info
