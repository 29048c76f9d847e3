from __future__ import annotations

import gc

import pytest

from torchweft.errors import ProtocolError
from torchweft.protocol.kept_code import KeptCodes, SentCode, SentCodes

LIMIT, LIMIT_BYTES = 3, 160


class Code:
    def __init__(self, size_bytes: int = 1) -> None:
        self.size_bytes = size_bytes


def send(codes: SentCodes, digest: bytes, size_bytes: int = 1) -> tuple[SentCode, tuple[int, ...]]:
    """Sends code; returns its entry, and the numbers that the message has the peer forget."""
    offer = codes.offer(size_bytes)
    assert offer is not None
    codes.sent(digest, offer)
    return offer.entry, offer.forgotten


@pytest.fixture
def codes() -> SentCodes:
    return SentCodes(LIMIT, LIMIT_BYTES)


@pytest.fixture
def kept() -> KeptCodes[Code]:
    return KeptCodes(LIMIT, LIMIT_BYTES)


# The caller's side


def test_code_is_known_only_once_it_was_sent(codes: SentCodes) -> None:
    assert codes.get(b"a") is None
    offer = codes.offer(1)
    assert offer is not None
    assert codes.get(b"a") is None
    codes.sent(b"a", offer)
    assert codes.get(b"a") is offer.entry


def test_what_was_used_longest_ago_is_forgotten(codes: SentCodes) -> None:
    first = send(codes, b"a")[0].number
    second = send(codes, b"b")[0].number
    send(codes, b"c")
    codes.get(b"a")
    assert send(codes, b"d")[1] == (second,)
    assert codes.get(b"b") is None
    assert send(codes, b"e")[1] == (3,)
    assert codes.get(b"a") is not None
    assert send(codes, b"b")[1] == (4,)
    assert send(codes, b"d")[1] == (5,)
    assert send(codes, b"f")[1] == (first,)


def test_what_a_request_holds_is_not_forgotten(codes: SentCodes) -> None:
    entry, _ = send(codes, b"a")
    others = [send(codes, digest)[0].number for digest in (b"b", b"c")]
    assert send(codes, b"d")[1] == (others[0],)  # The oldest one is evicted, and held.
    assert codes.get(b"a") is None
    assert send(codes, b"e")[1] == (others[1],)
    number = entry.number
    del entry
    assert send(codes, b"f")[1] == (number,)


def test_there_is_no_room_while_requests_hold_everything(codes: SentCodes) -> None:
    entries = [send(codes, digest)[0] for digest in (b"a", b"b", b"c")]
    assert codes.offer(1) is None
    entries.pop()
    assert send(codes, b"d")[1] == (3,)


def test_room_is_counted_in_bytes_too(codes: SentCodes) -> None:
    assert codes.offer(LIMIT_BYTES // 16 + 1) is None
    wide = SentCodes(100, LIMIT_BYTES)
    for number in range(16):
        assert send(wide, bytes([number]), LIMIT_BYTES // 16)[1] == ()
    assert send(wide, b"last", 1)[1] == (1,)
    assert send(wide, b"more", LIMIT_BYTES // 16 - 1)[1] == ()


def test_code_whose_message_was_not_sent_is_forgotten_with_the_next_one(codes: SentCodes) -> None:
    send(codes, b"a")
    offer = codes.offer(1)
    assert offer is not None
    number = offer.entry.number
    del offer  # An interrupt, or an error of the connection.
    assert send(codes, b"b")[1] == (number,)


def test_numbers_that_were_not_told_are_told_again(codes: SentCodes) -> None:
    for digest in (b"a", b"b", b"c"):
        send(codes, digest)
    offer = codes.offer(1)
    assert offer is not None
    assert offer.forgotten == (1,)
    number = offer.entry.number
    del offer
    assert sorted(send(codes, b"e")[1]) == [1, number]
    assert send(codes, b"f")[1] == (2,)


def test_numbers_are_never_used_again(codes: SentCodes) -> None:
    numbers = [send(codes, b"same")[0].number for _ in range(50)]
    assert len(set(numbers)) == 50


def test_a_lost_peer_keeps_nothing(codes: SentCodes) -> None:
    send(codes, b"a")
    codes.close()
    assert codes.get(b"a") is None
    assert codes.offer(1) is None


def test_nothing_grows_with_the_number_of_codes(codes: SentCodes) -> None:
    for number in range(10_000):
        send(codes, number.to_bytes(4, "little"))
    gc.collect()
    sizes = len(codes._table), len(codes._sizes), len(codes._unused), len(codes._forgotten)
    assert sizes == (LIMIT, LIMIT, 0, 0)
    assert codes._size_bytes == LIMIT


# The callee's side


def test_codes_are_found_by_their_numbers_until_they_are_forgotten(kept: KeptCodes[Code]) -> None:
    first, second, third = Code(), Code(), Code()
    kept.keep(1, (), first)
    kept.keep(2, (), second)
    assert kept.find((2, 1, 2)) == [second, first, second]
    kept.keep(3, (1,), third)
    assert kept.find((3,)) == [third]
    with pytest.raises(ProtocolError, match="names code 1, which was not sent"):
        kept.find((3, 1))


def test_a_number_that_is_not_kept_may_be_forgotten(kept: KeptCodes[Code]) -> None:
    kept.keep(1, (7, 7, 1), Code())
    assert len(kept) == 1


def test_a_number_in_use_is_refused(kept: KeptCodes[Code]) -> None:
    kept.keep(1, (), Code())
    with pytest.raises(ProtocolError, match="two codes have the number 1"):
        kept.keep(1, (), Code())


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (100, 61), (161,)])
def test_more_than_the_limit_is_refused(kept: KeptCodes[Code], sizes: tuple[int, ...]) -> None:
    *earlier, last = sizes
    for number, size in enumerate(earlier):
        kept.keep(number, (), Code(size))
    with pytest.raises(ProtocolError, match="more code than its limit of 3 functions and 160"):
        kept.keep(9, (), Code(last))


def test_room_is_made_before_it_is_taken(kept: KeptCodes[Code]) -> None:
    for number in range(100):
        kept.keep(number, (number - 1,), Code(LIMIT_BYTES))
    assert len(kept) == 1


def test_nothing_is_kept_for_a_lost_peer(kept: KeptCodes[Code]) -> None:
    kept.keep(1, (), Code())
    kept.close()
    assert not len(kept)
    with pytest.raises(ProtocolError):
        kept.keep(2, (), Code())
