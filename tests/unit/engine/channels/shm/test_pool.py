from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.memory_counts import shared_counts
from torchweft.engine.channels import shm as pool_module
from torchweft.engine.channels.memory import address_of, slab_size
from torchweft.engine.channels.shm import (
    TICKET_COUNT,
    Borrowed,
    Borrower,
    Loan,
    Process,
    SharedPool,
    attach,
    make_pool,
)

KIB, MIB = 1 << 10, 1 << 20


class Mortal(Process):
    """A process that is dead when the test says so."""

    dead = False

    def is_dead(self) -> bool:
        return type(self).dead


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = SharedPool(16 * MIB)
    yield made
    made.close()


@pytest.fixture
def borrowed(pool: SharedPool) -> Borrowed:
    return Borrowed(attach(pool.descriptor, pool.area.nonce), "trainer")


@pytest.fixture
def borrower() -> Borrower:
    class Own(Mortal):
        pass

    return Borrower(Own(1, "now"))


def lend(pool: SharedPool, borrower: Borrower, size_bytes: int) -> Loan:
    loan = pool.lend(size_bytes, borrower)
    assert loan is not None
    return loan


def test_a_machine_short_of_memory_lends_nothing_new(
    pool: SharedPool, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 200 * KIB)
    pool.take_back(lend(pool, borrower, 64 * KIB).tag)
    monkeypatch.setattr(pool_module, "available_bytes", lambda: 100 * KIB)
    assert pool.lend(64 * KIB, borrower) is not None
    assert pool.lend(64 * KIB, borrower) is None
    assert shared_counts(pool).resident_bytes == 64 * KIB


def test_pages_that_cannot_be_had_are_no_loan(
    pool: SharedPool, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(offset: int, size_bytes: int) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(pool.area, "populate", fail)
        assert pool.lend(KIB, borrower) is None
        assert shared_counts(pool) == (0, 0, 0, 0)
    assert pool.lend(KIB, borrower) is not None


def test_an_interrupt_while_pages_are_made_leaves_nothing(
    pool: SharedPool, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(offset: int, size_bytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(pool.area, "populate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.lend(KIB, borrower)
    assert shared_counts(pool) == (0, 0, 0, 0)


def test_idle_memory_is_given_back(pool: SharedPool, borrower: Borrower) -> None:
    first = lend(pool, borrower, 64 * KIB)
    assert shared_counts(pool).loan_count == 1
    pool.take_back(first.tag)
    pool.trim()
    before = os.fstat(pool.descriptor).st_blocks
    lent, idle = lend(pool, borrower, MIB), lend(pool, borrower, 64 * KIB)
    pool.take_back(idle.tag)
    assert pool.trim(idle_s=1000.0) == 0
    assert pool.trim() == 64 * KIB
    assert shared_counts(pool) == (MIB, 0, 1, 2)
    pool.take_back(lent.tag)
    assert pool.trim() == MIB
    assert os.fstat(pool.descriptor).st_blocks == before


def test_there_are_only_so_many_loans(
    pool: SharedPool, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TICKET_COUNT", 3)
    entries = [lend(pool, borrower, KIB) for _ in range(3)]
    assert pool.lend(KIB, borrower) is None
    assert shared_counts(pool).idle_bytes == slab_size(KIB)
    pool.take_back(entries[1].tag)
    assert lend(pool, borrower, KIB).tag & 0xFFFF == entries[1].tag & 0xFFFF
    assert TICKET_COUNT == 1 << 16


def test_memory_of_others_is_not_lent_as_shared(pool: SharedPool, borrower: Borrower) -> None:
    memory = pool.share(KIB)
    private = np.zeros(KIB, dtype=np.uint8)
    assert pool.lend_shared(private.ctypes.data, KIB, borrower) is None
    copied = lend(pool, borrower, KIB)
    assert pool.lend_shared(pool.area.address + copied.offset, KIB, borrower) is None
    beyond = address_of(memory) + slab_size(KIB) - 1
    assert pool.lend_shared(beyond, 2, borrower) is None


def test_a_system_without_such_memory_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert make_pool(16 * MIB) is None


def test_many_threads_lend_and_give_back(pool: SharedPool, borrowed: Borrowed) -> None:
    wrong: list[tuple[int, int]] = []

    def use(mark: int) -> None:
        borrower = Borrower(Mortal(mark, "now"))
        kept: list[torch.Tensor] = []
        for number in range(150):
            size_bytes = (1 + number % 5) * 16 * KIB
            loan = pool.lend(size_bytes, borrower)
            if loan is None:
                kept.clear()
                continue
            pool.area.memory[loan.offset : loan.offset + size_bytes] = mark
            memory = borrowed.take(loan.content, size_bytes)
            kept.append(torch.frombuffer(memory, dtype=torch.uint8))
            wrong.extend(
                (mark, each.numel()) for each in kept if each[0] != mark or each[-1] != mark
            )
            if number % 7 == 0:
                kept.clear()
            if number % 50 == 0:
                pool.trim()

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert shared_counts(pool).loan_count == 0
    assert shared_counts(pool).resident_bytes <= 16 * MIB


class _SendsInItsFinalizer:
    """Cyclic garbage that lends, shares and trims in its finalizer."""

    outcomes: ClassVar[list[object]] = []

    def __init__(self, pool: SharedPool, borrower: Borrower) -> None:
        self.cycle = self
        self.pool = pool
        self.borrower = borrower

    def __del__(self) -> None:
        self.outcomes.append((self.pool.lend(KIB, self.borrower), self.pool.trim()))
        try:
            self.pool.share(KIB)
        except MemoryError as error:
            self.outcomes.append(error)


def test_a_finalizer_inside_the_lock_gets_no_loan(
    pool: SharedPool, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = _SendsInItsFinalizer.outcomes
    outcomes.clear()
    real = pool._collect

    def collect_garbage_as_well() -> None:
        _SendsInItsFinalizer(pool, borrower)
        gc.collect()
        real()

    monkeypatch.setattr(pool, "_collect", collect_garbage_as_well)
    entry = lend(pool, borrower, KIB)
    assert outcomes[0] == (None, 0)
    assert isinstance(outcomes[1], MemoryError)
    monkeypatch.undo()
    assert shared_counts(pool).loan_count == 1
    pool.take_back(entry.tag)
