"""What this machine's kernel knows of the other end of a TCP connection.

Keep-alive probes are answered by the kernel of the other side for as long as the process has the
connection, whatever its threads do. So the time of the last answer tells a silent network, or a
machine that is gone, from a worker that is busy.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct

_LAST_RECEIVED = struct.Struct("=II")
_LAST_RECEIVED_OFFSET = 52
"""Of ``tcpi_last_data_recv`` and ``tcpi_last_ack_recv`` in Linux's ``struct tcp_info``."""
_INFO_BYTES = _LAST_RECEIVED_OFFSET + _LAST_RECEIVED.size

CAN_HEAR = hasattr(socket, "TCP_INFO")
"""Whether this system tells; where not, its own limits end a silent connection."""


def probe_interval_s(detection_s: float) -> int:
    """Returns how often an idle connection is probed: kernels count in whole seconds."""
    return max(1, math.floor(detection_s / 5))


def keep_alive(connection: socket.socket, detection_s: float) -> None:
    """Has the kernel probe a TCP connection while nothing else is sent.

    Where ``silence_s`` does not work, the kernel ends the connection itself after about
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
    """Returns for how many seconds nothing came from the other side; None where unknown."""
    if not CAN_HEAR:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        data_ms, acknowledgement_ms = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET)
    except (OSError, struct.error):
        return None
    return float(min(data_ms, acknowledgement_ms)) / 1e3
