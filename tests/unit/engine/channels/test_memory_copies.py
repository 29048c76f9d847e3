from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.thread_limits import no_new_threads
from torchweft import knobs, probe
from torchweft.engine.channels import memory as copying
from torchweft.engine.channels.memory import PIECE_BYTES, Copier, address_of

SIZE = 4 * PIECE_BYTES + 3
PATTERN = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
NAME = "weft-copy-test"

Copy = Callable[[memoryview], None]


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    with knobs.SHARED_COPY_BYTES.override(PIECE_BYTES):
        made = Copier(NAME)
    # Share copies even on a machine with one core, or while other tests run.
    made._may_share = True
    monkeypatch.setattr(copying, "core_is_free", lambda: True)
    yield made
    made.close()


@pytest.fixture
def copy(copier: Copier) -> Copy:
    """Returns a function that fills the given memory with the pattern."""
    return lambda into: copy_into(copier, into)


def copy_into(copier: Copier, into: memoryview, size_bytes: int | None = None) -> None:
    source = memoryview(PATTERN)
    size_bytes = into.nbytes if size_bytes is None else size_bytes
    copier.copy(address_of(source), address_of(into), size_bytes, (source, into))


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def memory(size_bytes: int = SIZE) -> memoryview:
    return memoryview(bytearray(size_bytes))


def job_into(into: memoryview) -> copying._Job:
    target, source = address_of(into), address_of(memoryview(PATTERN))
    ctypes.memmove(target, source, PIECE_BYTES)
    return copying._Job(source, target, into.nbytes, (PATTERN, into))


def test_a_copier_that_gets_no_thread_copies_alone_and_tries_again_later(
    copy: Copy, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_new_threads(monkeypatch):
        copy(memory())
    assert NAME not in thread_names()
    copy(memory())
    assert NAME in thread_names()


def test_a_core_is_free_where_fewer_threads_run_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LOAD", str(tmp_path / "loadavg"))
    assert not copying.core_is_free(), "it is not known"
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for running, is_free in [(1, True), (2, True), (3, False), (12, False)]:
        (tmp_path / "loadavg").write_text(f"0.5 0.4 0.3 {running}/345 6789\n")
        assert copying.core_is_free() is is_free


def test_a_helper_that_comes_late_touches_nothing() -> None:
    into = memory()
    job = job_into(into)
    job.run()
    job.finish()
    into[:] = bytes(SIZE)
    job.help()
    assert into == bytes(SIZE)


def test_a_helper_that_has_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    def copy_slowly(*_: int) -> None:
        began.set()
        may_end.wait()

    job = job_into(memory(2 * PIECE_BYTES))
    monkeypatch.setattr(ctypes, "memmove", copy_slowly)
    helper = threading.Thread(target=job.help)
    helper.start()
    began.wait()
    # ``finish`` must return after this timer, however late the timer fires.
    timer = threading.Timer(0.02, may_end.set)
    timer.start()
    job.finish()
    assert may_end.is_set()
    helper.join()
    timer.join()
