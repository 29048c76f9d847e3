from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.channels.stripes import HEADER_BYTES, Stripe, decode_stripe
from torchweft.errors import ProtocolError

LIMIT_BYTES = 1 << 40
u64 = st.integers(0, (1 << 64) - 1)


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


@given(st.tuples(u64, u64, u64, u64, u64))
def test_what_is_accepted_lies_within_its_transfer(fields: tuple[int, ...]) -> None:
    try:
        stripe = decode_stripe(Stripe(*fields).encode(), LIMIT_BYTES)
    except ProtocolError:
        return
    assert 0 < stripe.length_bytes <= stripe.size_bytes - stripe.offset
    assert stripe.size_bytes <= LIMIT_BYTES
