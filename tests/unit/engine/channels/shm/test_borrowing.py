from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.engine.channels.processes import forked
from torchweft.engine.channels import shm as borrowed_module
from torchweft.engine.channels.shm import LOAN, SLABS_OFFSET, Area, Borrowed, attach, create
from torchweft.errors import ProtocolError

MIB = 1 << 20
SIZE = SLABS_OFFSET + 4 * MIB


@pytest.fixture
def areas() -> tuple[Area, Area]:
    """The same memory, as mapped by its lender and by a borrower."""
    descriptor, area = create(4 * MIB)
    try:
        return area, attach(descriptor, area.nonce)
    finally:
        os.close(descriptor)


@pytest.fixture
def lender(areas: tuple[Area, Area]) -> Area:
    return areas[0]


@pytest.fixture
def borrowed(areas: tuple[Area, Area]) -> Borrowed:
    return Borrowed(areas[1], "worker 'trainer'")


@pytest.mark.parametrize(
    ("place", "size_bytes"),
    [(0, 16), (SLABS_OFFSET - 1, 16), (SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), (SLABS_OFFSET, SIZE)],
)
def test_memory_outside_of_the_slabs_is_refused(
    borrowed: Borrowed, place: int, size_bytes: int
) -> None:
    with pytest.raises(ProtocolError, match="worker 'trainer' lends bytes"):
        borrowed.take(LOAN.pack(place, 1), size_bytes)


def test_the_tag_is_written_once_the_last_view_is_gone(lender: Area, borrowed: Borrowed) -> None:
    tag = 77 << 16 | 5
    tensor = torch.frombuffer(borrowed.take(LOAN.pack(SLABS_OFFSET, tag), MIB), dtype=torch.float32)
    view = tensor.view(512, 512)[3:5].t()
    del tensor
    gc.collect()
    assert lender.words[5] == 0
    del view
    assert lender.words[5] == tag
    assert int(lender.words.astype(bool).sum()) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loan_whose_end_is_interrupted_ends_later(lender: Area, borrowed: Borrowed) -> None:
    tags, interrupted = range(1 << 16, 64 << 16, 1 << 16), 0
    for step, tag in enumerate(tags, 1):
        views = [borrowed.take(LOAN.pack(SLABS_OFFSET, tag | 5), MIB)]
        *_, lease = borrowed_module._leases.values()
        if not interrupt_at(step, views.clear):
            break
        interrupted += lender.words[5] != tag | 5
        borrowed_module.end_dead_loans()
        assert lender.words[5] == tag | 5
        assert id(lease) not in borrowed_module._leases
    assert 0 < interrupted < step < 20


def interrupt_at(step: int, run: Callable[[], object]) -> bool:
    """Raises at one step of the end of a loan in ``run``; returns whether it was reached."""
    seen = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal seen
        if frame.f_code is borrowed_module._end.__code__ and event != "return":
            seen += 1
            if seen == step:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen >= step


def test_a_ticket_beyond_all_tickets_hits_no_other_memory(lender: Area, borrowed: Borrowed) -> None:
    tag = (1 << 64) - 1
    borrowed.refuse(LOAN.pack(SLABS_OFFSET, tag))
    assert lender.words[0xFFFF] == tag
    assert not lender.memory[SLABS_OFFSET:].any()


def test_a_tensor_outlives_the_connection() -> None:
    descriptor, lender = create(4 * MIB)
    borrowed = Borrowed(attach(descriptor, lender.nonce), "ps")
    os.close(descriptor)
    memory = borrowed.take(LOAN.pack(SLABS_OFFSET, 1 << 16), 10)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    del borrowed, memory
    gc.collect()
    tensor.fill_(9)
    assert lender.memory[SLABS_OFFSET : SLABS_OFFSET + 11].tolist() == [9] * 10 + [0]
    del tensor
    assert lender.words[0] == 1 << 16


def test_a_forked_child_ends_no_loan_of_its_parent(lender: Area, borrowed: Borrowed) -> None:
    memory = [borrowed.take(LOAN.pack(SLABS_OFFSET, 3 << 16), 10)]

    def drop(link: socket.socket) -> None:
        memory.clear()
        gc.collect()
        link.send(b"%d" % lender.words[0])
        link.recv(1)

    with forked(drop) as (_, link):
        assert link.recv(10) == b"0"
        assert lender.words[0] == 0
    memory.clear()
    assert lender.words[0] == 3 << 16
