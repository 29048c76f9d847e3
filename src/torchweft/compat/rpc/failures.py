"""Says on the worker that serves a call that the call failed there, as programs expect to see.

Weft itself leaves that to the caller, who gets the error with the traceback of the other side.
"""

from __future__ import annotations

import logging

from torchweft.agent.peers import Peer
from torchweft.serialize.exceptions import chain
from torchweft.serialize.tracebacks import places_of, shorten

_log = logging.getLogger("torchweft")


def log(caller: Peer, error: BaseException) -> None:
    """Logs the error of a call that ``caller`` made, unless another worker has done so."""
    if not any(map(places_of, chain(error))):
        shorten(error)
        _log.warning("a call of worker %r failed here", caller.name, exc_info=error)
