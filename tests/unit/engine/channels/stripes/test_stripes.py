from __future__ import annotations

import pytest

from torchweft.engine.channels.stripes import HEADER_BYTES, Stripe, decode_stripe
from torchweft.errors import ProtocolError

LIMIT_BYTES = 1 << 40


def test_a_header_survives() -> None:
    stripe = Stripe(token=7, position=2, offset=4096, length_bytes=100, size_bytes=5000)
    data = stripe.encode()
    assert len(data) == HEADER_BYTES
    assert decode_stripe(data, LIMIT_BYTES) == stripe


@pytest.mark.parametrize(
    ("offset", "length", "size", "what"),
    [
        (0, 0, 10, "no part"),
        (5, 6, 10, "no part"),
        (11, 1, 10, "no part"),
        ((1 << 64) - 1, 1, 10, "no part"),
        (0, 1, LIMIT_BYTES + 1, "the limit is"),
        (0, (1 << 64) - 1, (1 << 64) - 1, "the limit is"),
    ],
)
def test_what_cannot_be_is_refused(offset: int, length: int, size: int, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode_stripe(Stripe(1, 0, offset, length, size).encode(), LIMIT_BYTES)
