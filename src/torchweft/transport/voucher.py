"""Vouchers: the first bytes of a member's connection, which tell it from those of strangers.

A worker that strangers flood must make room before it can perform a handshake with anyone. A
voucher shows, before any question, that its sender has the key. It admits nobody: the handshake
follows. Over TLS the voucher is the server name in the first message, otherwise a frame.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import socket

from torchweft.secret import Secret
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import Kind

NUMBER_BYTES = PROOF_BYTES = 16
FRAME_LIMIT_BYTES = 256
_LOOK_BYTES = 4096
"""A voucher is among the first so many bytes of a connection."""
_SUFFIX = "voucher.weft"
_FORM = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{32})\.voucher\.weft")


def new_voucher(key: Secret, to: int) -> str:
    """Returns a voucher for one connection, in the form of a host name.

    Args:
        key: The key that both sides have.
        to: The id of the worker that is dialled.
    """
    number = secrets.token_bytes(NUMBER_BYTES)
    return f"{number.hex()}.{_proof(key, to, number).hex()}.{_SUFFIX}"


def frame_with(voucher: str) -> bytes:
    """Returns the frame that brings a voucher where there is no TLS."""
    return b"".join(encode_frame(Kind.VOUCHER, 0, 0, voucher.encode()))


def look_for_number(connection: socket.socket, key: Secret, me: int) -> bytes | None:
    """Returns the number of a valid voucher among the bytes that have arrived; None without one.

    The bytes stay there to be read. Never waits and never raises, provided that no other thread
    reads the connection: on a connection that has ended, there is no voucher.

    Args:
        connection: The connection, without TLS around it.
        key: The key that both sides have.
        me: The id of this worker.
    """
    with contextlib.suppress(OSError, ValueError):  # Ended, or closed.
        arrived = select.poll()
        arrived.register(connection, select.POLLIN)
        # Asked first: with a timeout set, the socket would wait whatever the flags are.
        if arrived.poll(0):
            return number_in(connection.recv(_LOOK_BYTES, socket.MSG_PEEK), key, me)
    return None


def number_in(data: bytes, key: Secret, me: int) -> bytes | None:
    """Returns the number of the first voucher in ``data`` if it is valid, else None."""
    found = _FORM.search(data)
    if found is None:
        return None
    number, proof = (bytes.fromhex(text.decode()) for text in found.groups())
    # Not ``verify``, which compares whole signatures.
    return number if secrets.compare_digest(proof, _proof(key, me, number)) else None


def _proof(key: Secret, to: int, number: bytes) -> bytes:
    return key.sign(b"voucher", str(to).encode(), number)[:PROOF_BYTES]
