"""Waits for the host of a rendezvous store.

PyTorch's client waits as well, but longer than it was told, and logs a stack for each attempt.
"""

from __future__ import annotations

import os
import socket
import time
from urllib.parse import urlsplit

from torchweft.runtime.long_waits import Notice

_POLL_S = 0.05
_LEAST_S = 0.01


def await_host(init_method: str, rank: int, timeout_s: float) -> None:
    """Blocks until a host listens at the store's address in ``init_method``.

    Args:
        init_method: ``env://`` or ``tcp://host:port``; other methods have no host to wait for.
        rank: This worker's rank; rank 0 is the host itself, unless ``torchrun`` is.
        timeout_s: How long to wait, in seconds; a long wait is logged.

    Raises:
        OSError: No host listened in time; the error of the last attempt.
        ValueError: The port is not a number.
    """
    place = _place_of(init_method)
    if place is None or (rank == 0 and not _is_hosted_by_launcher()):
        return
    end_s = time.monotonic() + timeout_s
    where = "{}:{}".format(*place)
    notice = Notice(f"rank {rank}", lambda: f"in init_rpc for rank 0 to open the store at {where}")
    while True:
        notice.look()
        try:
            left_s = max(min(end_s - time.monotonic(), notice.left_s()), _LEAST_S)
            socket.create_connection(place, timeout=left_s).close()
            return
        except OSError:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(_POLL_S, left_s))


def name_of(init_method: str) -> str:
    """Returns the address of the store of an init method, for messages."""
    place = _place_of(init_method)
    return init_method if place is None else f"{place[0]}:{place[1]}"


def _place_of(init_method: str) -> tuple[str, int] | None:
    parts = urlsplit(init_method)
    if parts.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
        return parts.hostname, parts.port
    return None


def _is_hosted_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
