"""Says on the worker that serves a call that the call failed there, as programs expect to see.

Weft itself leaves that to the caller, who gets the error with the traceback of the other side.
"""

from __future__ import annotations

import logging

from weft.agent.peers import Peer
from weft.serialize.exceptions import RemoteTraceback

_log = logging.getLogger("weft")


def log(caller: Peer, error: BaseException) -> None:
    """Logs the error of a call that ``caller`` made, unless another worker has done so."""
    if not _came_from_elsewhere(error):
        _log.warning("a call of worker %r failed here", caller.name, exc_info=error)


def _came_from_elsewhere(error: BaseException) -> bool:
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen:
        if isinstance(part, RemoteTraceback):
            return True
        seen.add(id(part))
        part = part.__cause__ or part.__context__
    return False
