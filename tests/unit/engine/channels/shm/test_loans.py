"""Random lending, ending, losing and sharing, checked against a model of the memory in use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from tests.memory_counts import shared_counts
from tests.thorough import examples
from torchweft.engine.channels.memory import address_of
from torchweft.engine.channels.shm import LOAN, Borrowed, Borrower, Process, SharedPool, attach

KIB = 1 << 10
LIMIT = 512 * KIB
SIZES = st.sampled_from([1, 16 * KIB, 17 * KIB, 64 * KIB, 200 * KIB])


class Undead(Process):
    """A process that is dead when the state machine says so."""

    def is_dead(self) -> bool:
        return self.started in DEAD


DEAD: set[str] = set()


class Held(NamedTuple):
    """Memory that a borrower holds, and the byte that fills it until the loan ends."""

    memory: memoryview
    mark: int
    name: str


class Loans(RuleBasedStateMachine):
    held: Bundle[int] = Bundle("held")
    shared: Bundle[int] = Bundle("shared")

    @initialize()
    def begin(self) -> None:
        DEAD.clear()
        self.pool = SharedPool(LIMIT)
        self.borrowed = Borrowed(attach(self.pool.descriptor, self.pool.area.nonce), "peer")
        self.numbers = iter(range(1, 1 << 30))
        self.borrower = self.new_borrower()
        self.in_use: dict[int, Held] = {}
        self.owned: dict[int, memoryview] = {}
        self.old_tags: list[int] = []
        self.abandoned = 0

    def new_borrower(self) -> Borrower:
        return Borrower(Undead(1, f"start {next(self.numbers)}"))

    @rule(target=held, size_bytes=SIZES)
    def lend(self, size_bytes: int) -> int:
        number = next(self.numbers)
        loan = self.pool.lend(size_bytes, self.borrower)
        if loan is None:
            return number
        mark = number % 251
        self.pool.area.memory[loan.offset : loan.offset + size_bytes] = mark
        memory = self.borrowed.take(loan.content, size_bytes)
        self.in_use[number] = Held(memory, mark, self.borrower.process.started)
        self.old_tags.append(loan.tag)
        return number

    @rule(size_bytes=SIZES, is_told=st.booleans())
    def lend_in_vain(self, size_bytes: int, is_told: bool) -> None:
        loan = self.pool.lend(size_bytes, self.borrower)
        if loan is not None and is_told:
            self.borrowed.refuse(loan.content)
        elif loan is not None:
            self.pool.take_back(loan.tag)

    @rule(number=consumes(held))
    def end(self, number: int) -> None:
        self.in_use.pop(number, None)

    @rule(index=st.integers(0, 1 << 20))
    def end_again(self, index: int) -> None:
        """A stray store of a tag whose loan has ended must have no effect."""
        ended = [tag for tag in self.old_tags if tag not in self.live_tags()]
        if ended:
            self.borrowed.refuse(LOAN.pack(1 << 21, ended[index % len(ended)]))

    def live_tags(self) -> set[int]:
        shared_counts(self.pool)
        return set(self.pool._tags.tolist())

    @rule(target=shared, size_bytes=SIZES)
    def share(self, size_bytes: int) -> int:
        number = next(self.numbers)
        try:
            memory = self.pool.share(size_bytes)
        except MemoryError:
            return number
        np.frombuffer(memory, dtype=np.uint8)[:] = number % 251
        self.owned[number] = memory
        return number

    @rule(target=held, number=shared)
    def pass_on(self, number: int) -> int:
        memory = self.owned.get(number)
        taken = next(self.numbers)
        if memory is None:
            return taken
        loan = self.pool.lend_shared(address_of(memory), memory.nbytes, self.borrower)
        assert loan is not None
        name = self.borrower.process.started
        self.in_use[taken] = Held(
            self.borrowed.take(loan.content, memory.nbytes), number % 251, name
        )
        return taken

    @rule(number=consumes(shared))
    def disown(self, number: int) -> None:
        self.owned.pop(number, None)

    @rule(is_dead=st.booleans())
    def lose(self, is_dead: bool) -> None:
        """A dead borrower no longer uses its memory; a living one keeps it."""
        name = self.borrower.process.started
        if is_dead:
            DEAD.add(name)
        self.pool.lose(self.borrower)
        if is_dead:
            self.in_use = {n: each for n, each in self.in_use.items() if each.name != name}
        self.borrower = self.new_borrower()

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert shared_counts(self.pool).idle_bytes == 0

    @invariant()
    def what_is_in_use_is_nobody_else_s(self) -> None:
        for memory, mark, _ in self.in_use.values():
            content = np.frombuffer(memory, dtype=np.uint8)
            assert content[0] == content[-1] == mark
            assert (content == mark).all()
        for number, memory in self.owned.items():
            assert (np.frombuffer(memory, dtype=np.uint8) == number % 251).all()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        statistics = shared_counts(self.pool)
        assert statistics.loan_count == len(self.in_use)
        assert statistics.idle_bytes <= statistics.resident_bytes <= LIMIT
        free_bytes = self.pool._extents.free_bytes()
        assert free_bytes == LIMIT - statistics.resident_bytes

    def teardown(self) -> None:
        self.in_use.clear()
        self.owned.clear()
        statistics = shared_counts(self.pool)
        assert (statistics.loan_count, statistics.idle_bytes) == (0, statistics.resident_bytes)
        self.pool.close()


Loans.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
test_loans = pytest.mark.timeout(60)(Loans.TestCase)
