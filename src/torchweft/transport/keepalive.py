"""Asks this machine's kernel when it last heard from the peer of a TCP connection.

The peer's kernel answers keepalive probes for as long as the process has the connection, whatever
its threads do. So the time of the last answer distinguishes a silent network, or a dead machine,
from a busy worker.

If only our outgoing path fails, we still receive the peer's retransmissions. So while we
retransmit too, incoming data is no sign of life.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct

_RETRANSMITS_OFFSET = 2
"""Of ``tcpi_retransmits``: retransmissions of the oldest data since the last acknowledgement."""
_LAST_RECEIVED = struct.Struct("=II")
_LAST_RECEIVED_OFFSET = 52
"""Of ``tcpi_last_data_recv`` and ``tcpi_last_ack_recv`` in Linux's ``struct tcp_info``."""
_INFO_BYTES = _LAST_RECEIVED_OFFSET + _LAST_RECEIVED.size

CAN_HEAR = hasattr(socket, "TCP_INFO")
"""Whether the system has this information; if not, its own limits end a silent connection."""


def probe_interval_s(detection_s: float) -> int:
    """Returns the interval of probes on an idle connection: kernels count in whole seconds."""
    return max(1, math.floor(detection_s / 5))


def keep_alive(connection: socket.socket, detection_s: float) -> None:
    """Makes the kernel probe a TCP connection while nothing else is sent.

    If ``silence_s`` does not work, the kernel ends the connection itself after about
    ``detection_s``.
    """
    interval_s = probe_interval_s(detection_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": max(2, math.ceil(detection_s / interval_s)),
        "TCP_USER_TIMEOUT": int(2e3 * detection_s if CAN_HEAR else 1e3 * detection_s),
    }
    for name, value in limits.items():
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float | None:
    """Returns the seconds since anything came from the peer.

    None if unknown, or meaningless because the peer does not acknowledge what this side sends.
    """
    info = _info(connection)
    if not info or info[_RETRANSMITS_OFFSET]:
        return None
    return float(min(_LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET))) / 1e3


def is_unanswered(connection: socket.socket) -> bool:
    """Whether the peer does not acknowledge what this side sends, as far as is known."""
    info = _info(connection)
    return bool(info and info[_RETRANSMITS_OFFSET])


def _info(connection: socket.socket) -> bytes:
    """Returns the beginning of ``struct tcp_info``; empty if there is none."""
    if not CAN_HEAR:
        return b""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return b""
    return info if len(info) == _INFO_BYTES else b""
