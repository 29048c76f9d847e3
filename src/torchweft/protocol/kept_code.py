"""Which code one worker keeps for another: the tables of both sides.

A function that travels by value consists of code, which never changes, and of captured values. The
caller sends the code once and then names it by a number. A number must never name code that the
callee lacks. But many threads of the caller look numbers up, write calls and evict entries at the
same time, and calls are given up before they are written.

The caller alone decides. It puts a number into its table after it has sent the code. When no
request holds the entry any more, it tells the callee to forget the number: an entry that all
requests have dropped enqueues its number by itself. Messages arrive in order, and the callee looks
numbers up as it reads. So each number is there. Numbers are never used again, so the late end of an
entry cannot remove a later one.

``docs/protocols/calls.md`` has the rules by name.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torchweft.errors import ProtocolError

_LARGEST_SHARE = 16
"""Code of more than this part of a peer's bytes is not kept: it would evict too much else."""


class SentCode:
    """An entry of ``SentCodes``. The peer keeps its code for as long as this object exists.

    Args:
        number: Its number, by which calls name it.
        unused: Gets the number when the object ends.
    """

    __slots__ = ("_unused", "number")

    def __init__(self, number: int, unused: deque[int]) -> None:
        self.number = number
        self._unused = unused

    def __del__(self) -> None:
        # A garbage collection may run this anywhere, so it only enqueues.
        self._unused.append(self.number)


class Offer(NamedTuple):
    """Code to be sent to the peer.

    Attributes:
        entry: Its entry, which no other thread has yet.
        forgotten: Numbers that the peer forgets before it keeps the code.
    """

    entry: SentCode
    forgotten: tuple[int, ...]


class SentCodes:
    """The code that one peer keeps for this worker, as the sender knows it.

    ``get`` may run in many threads, beside anything else. One thread at a time runs ``offer`` and,
    once the peer was sent the offer, ``sent``. If it is interrupted in between, the code counts as
    kept until its number is forgotten.

    Args:
        limit: How many codes the peer keeps.
        limit_bytes: Limit of their total size.
    """

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._table: OrderedDict[bytes, SentCode] = OrderedDict()
        self._sizes: dict[int, int] = {}
        """The sizes of all codes that the peer will have kept after the next message."""
        self._size_bytes = 0
        self._unused: deque[int] = deque()
        self._forgotten: list[int] = []
        self._numbers = itertools.count(1)

    def get(self, digest: bytes) -> SentCode | None:
        """Returns the entry of code that the peer surely keeps; None if it may lack the code."""
        entry = self._table.get(digest)
        if entry is not None:
            try:
                self._table.move_to_end(digest)
            except KeyError:
                pass  # Evicted meanwhile by another thread; it is kept while ``entry`` exists.
        return entry

    def offer(self, size_bytes: int) -> Offer | None:
        """Makes room for code, and gives it a number; None if there cannot be room now.

        Args:
            size_bytes: Its size.
        """
        if size_bytes > self._limit_bytes // _LARGEST_SHARE:
            return None
        self._collect()
        while len(self._sizes) >= self._limit or self._size_bytes + size_bytes > self._limit_bytes:
            if not self._table:
                return None  # Requests that are being written hold the rest.
            self._table.popitem(last=False)
            self._collect()
        entry = SentCode(next(self._numbers), self._unused)
        self._sizes[entry.number] = size_bytes
        self._size_bytes += size_bytes
        return Offer(entry, tuple(self._forgotten))

    def _collect(self) -> None:
        """Moves the numbers that no request holds to those that the next message forgets."""
        while self._unused:
            number = self._unused.popleft()
            self._forgotten.append(number)
            self._size_bytes -= self._sizes.pop(number, 0)

    def sent(self, digest: bytes, offer: Offer) -> None:
        """Notes that the message with an offer was sent, or queued in order: others may use it."""
        del self._forgotten[: len(offer.forgotten)]
        self._table[digest] = offer.entry

    def close(self) -> None:
        """Drops all entries, and takes no more: the peer is lost."""
        self._limit = 0
        self._table = OrderedDict()  # Other threads may be using the old one.


class Sized(Protocol):
    """Code, as far as its table needs it."""

    size_bytes: int
    """Its size on the wire."""


Kept = TypeVar("Kept", bound=Sized)


class KeptCodes(Generic[Kept]):
    """The code that this worker keeps for one peer.

    The thread that reads the peer uses it; any thread may close it.

    Args:
        limit: How many codes are kept.
        limit_bytes: Limit of their total size.
    """

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._table: dict[int, Kept] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._table)

    def keep(self, number: int, forgotten: Iterable[int], code: Kept) -> None:
        """Forgets codes, and keeps one more under a number.

        Raises:
            ProtocolError: The number is in use, or there is no room.
        """
        for each in forgotten:
            gone = self._table.pop(each, None)
            if gone is not None:  # Else the sender was interrupted, and says it twice.
                self._size_bytes -= gone.size_bytes
        if number in self._table:
            raise ProtocolError(f"two codes have the number {number}")
        self._size_bytes += code.size_bytes
        if len(self._table) >= self._limit or self._size_bytes > self._limit_bytes:
            raise ProtocolError(
                f"a worker sends more code than its limit of {self._limit} functions and "
                f"{self._limit_bytes} bytes"
            )
        self._table[number] = code

    def find(self, numbers: Sequence[int]) -> list[Kept]:
        """Returns the codes with numbers.

        Raises:
            ProtocolError: This worker does not keep one of them.
        """
        try:
            return [*map(self._table.__getitem__, numbers)]
        except KeyError as error:
            raise ProtocolError(f"a call names code {error}, which was not sent") from None

    def close(self) -> None:
        """Drops all codes, and takes no more: the peer is lost."""
        self._limit = 0
        self._table = {}
