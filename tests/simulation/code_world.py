"""A caller with many threads, a callee with many threads, and the tables of code between them.

The threads of the caller are generators, and the run resumes one at a time, chosen by the seed: so
they overtake one another at every step. The link keeps the order. The callee reads in order, and
handles calls in any order, maybe long after it has read them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from torchweft.protocol.kept_code import KeptCodes, Offer, SentCode, SentCodes

LIMIT, LIMIT_BYTES = 4, 64
CONTENTS = [bytes([number]) * (1 + number % 4) for number in range(1, 13)] + [b"large" * 20]
"""What functions are made of; there are more than the callee keeps, and one is too large."""


class Content(bytes):
    """Code as the callee keeps it."""

    size_bytes: int

    def __new__(cls, content: bytes) -> Content:
        made = super().__new__(cls, content)
        made.size_bytes = len(content)
        return made


class CodeMessage(NamedTuple):
    number: int
    forgotten: tuple[int, ...]
    content: Content


class CallMessage(NamedTuple):
    """A call that names its code.

    Attributes:
        numbers: What it says.
        meant: What its caller means.
    """

    numbers: tuple[int, ...]
    meant: tuple[bytes, ...]


class Caller:
    """The caller's side, as the shell drives ``SentCodes``."""

    table_type: type[SentCodes] = SentCodes
    publishes_first = False
    reports_sent = True

    def __init__(self) -> None:
        self.table = self.table_type(LIMIT, LIMIT_BYTES)
        self.link: deque[CodeMessage | CallMessage] = deque()
        self.is_locked = False
        self.whole = self.by_number = self.codes_sent = 0

    def thread(self, contents: Sequence[bytes]) -> Generator[None, None, None]:
        """Makes one call; may be ended at any of its steps, as an interrupt does."""
        entries: list[SentCode] = []
        for content in contents:
            entry = self.table.get(content)
            yield
            if entry is None:
                entry = yield from self._send(content)
            if entry is None:
                self.whole += 1
                return
            entries.append(entry)
        yield
        self.link.append(CallMessage(tuple(each.number for each in entries), tuple(contents)))
        self.by_number += 1
        yield  # The request lives on until the answer comes.

    def _send(self, content: bytes) -> Generator[None, None, SentCode | None]:
        if self.is_locked:
            return None
        self.is_locked = True
        try:
            known = self.table.get(content)
            yield
            if known is not None:
                return known
            offer = self.table.offer(len(content))
            if offer is None:
                return None
            yield
            if self.publishes_first:
                self.table.sent(content, offer)
                yield
            self._write(offer, content)
            yield
            if not self.publishes_first and self.reports_sent:
                self.table.sent(content, offer)
            yield
            return offer.entry
        finally:
            self.is_locked = False

    def _write(self, offer: Offer, content: bytes) -> None:
        self.codes_sent += 1
        self.link.append(CodeMessage(offer.entry.number, offer.forgotten, Content(content)))


class Callee:
    """The callee's side: reads in order, handles in any order."""

    resolves_when_read = True

    def __init__(self) -> None:
        self.table: KeptCodes[Content] = KeptCodes(LIMIT, LIMIT_BYTES)
        self.waiting: list[tuple[CallMessage, list[Content]]] = []
        self.handled = 0

    def read(self, message: CodeMessage | CallMessage) -> None:
        if isinstance(message, CodeMessage):
            self.table.keep(message.number, message.forgotten, message.content)
            assert len(self.table) <= LIMIT
        else:
            codes = self.table.find(message.numbers) if self.resolves_when_read else []
            self.waiting.append((message, codes))

    def handle(self, place: int) -> None:
        message, codes = self.waiting.pop(place)
        if not self.resolves_when_read:
            codes = self.table.find(message.numbers)
        assert tuple(codes) == message.meant, "a call got the code of another function"
        self.handled += 1


class CodeWorld:
    """One run: calls are made, interrupted, read and handled in an order that the seed decides."""

    def __init__(
        self, seed: int, caller: type[Caller] = Caller, callee: type[Callee] = Callee
    ) -> None:
        self._random = random.Random(seed)
        self._caller_type, self._callee_type = caller, callee
        self.trace: list[str] = []
        self.caller, self.callee = caller(), callee()
        self.threads: list[Generator[None, None, None]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        while self.threads:
            self._resume()
        self._read_all()
        self._check_end()

    def _step(self) -> None:
        choice = self._random.random()
        if choice < 0.15 and len(self.threads) < 6:
            contents = self._random.sample(CONTENTS, self._random.choice((1, 1, 1, 2, 3)))
            self.threads.append(self.caller.thread(contents))
        elif choice < 0.7:
            self._resume()
        elif choice < 0.72:
            self._interrupt()
        elif choice < 0.85 and self.caller.link:
            message = self.caller.link.popleft()
            self.trace.append(f"read {message}")
            self.callee.read(message)
        elif choice < 0.995 and self.callee.waiting:
            self.callee.handle(self._random.randrange(len(self.callee.waiting)))
        elif choice >= 0.999:
            self._replace()

    def _resume(self) -> None:
        if self.threads:
            thread = self._random.choice(self.threads)
            try:
                next(thread)
            except StopIteration:
                self.threads.remove(thread)

    def _interrupt(self) -> None:
        """Ends one thread where it is: an interrupt, or a call that cannot be written."""
        if self.threads:
            thread = self.threads.pop(self._random.randrange(len(self.threads)))
            self.trace.append("interrupt")
            thread.close()

    def _replace(self) -> None:
        """Has the callee die, and another life come in its place."""
        self.trace.append("lost")
        self.caller.table.close()
        assert self.caller.table.get(CONTENTS[0]) is None
        while self.threads:
            self._resume()
        self.caller, self.callee = self._caller_type(), self._callee_type()

    def _read_all(self) -> None:
        while self.caller.link:
            self.callee.read(self.caller.link.popleft())
        while self.callee.waiting:
            self.callee.handle(0)

    def _check_end(self) -> None:
        """Checks that nothing was leaked: there is room for all that the limit allows."""
        for number in range(LIMIT):
            for _ in self.caller.thread([bytes((100 + number,))]):
                pass
        before = self.caller.whole
        for number in range(LIMIT):
            for _ in self.caller.thread([bytes((100 + number,))]):
                pass
        assert self.caller.whole == before, "numbers have leaked"
        self._read_all()
        assert len(self.callee.table) == LIMIT
