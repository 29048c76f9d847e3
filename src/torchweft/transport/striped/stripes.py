"""The header of a stripe, which names its transfer and its place in it.

Little-endian, followed by ``length`` bytes of the tensor::

    token u64 | position u64 | offset u64 | length u64 | size of the whole transfer u64

A transfer is identified by its message's token and its position among that message's transfers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from torchweft.errors import ProtocolError

_HEADER = struct.Struct("<QQQQQ")
HEADER_BYTES = _HEADER.size


class TransferKey(NamedTuple):
    """Identifies a transfer of one sender by its message's token and its position there."""

    token: int
    position: int


class Stripe(NamedTuple):
    """A part of a transfer."""

    token: int
    position: int
    offset: int
    length_bytes: int
    size_bytes: int

    @property
    def key(self) -> TransferKey:
        """The transfer that the stripe is a part of."""
        return TransferKey(self.token, self.position)

    def encode(self) -> bytes:
        """Returns the header."""
        return _HEADER.pack(*self)


def decode_stripe(data: bytes | bytearray | memoryview, limit_bytes: int) -> Stripe:
    """Reads and checks a header, before any memory is allocated for the transfer.

    Raises:
        ProtocolError: The stripe is empty, lies outside of its transfer, or the transfer is
            larger than the limit.
    """
    stripe = Stripe._make(_HEADER.unpack(data))
    offset, length, size = stripe[2:]
    if size > limit_bytes:
        raise ProtocolError(f"a transfer announces {size} bytes; the limit is {limit_bytes}")
    if not length or offset + length > size:
        raise ProtocolError(
            f"a stripe of {length} bytes at {offset} is no part of a transfer of {size} bytes"
        )
    return stripe
