from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from tests.unit.engine.channels.processes import dead_pid, forked
from torchweft.engine.channels import pull as copying
from torchweft.engine.channels.memory import address_of
from torchweft.engine.channels.pull import NONCE_BYTES, find_obstacle, pull

PAGE = mmap.PAGESIZE
SIZE = (8 << 20) + 3
PATTERN = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
PROT_NONE = 0

_nonce = ctypes.create_string_buffer(b"a nonce of a peer"[:NONCE_BYTES], NONCE_BYTES)
_ADDRESS = ctypes.addressof(_nonce)
_obstacle = find_obstacle(os.getpid(), _ADDRESS, _nonce.raw)
pytestmark = pytest.mark.skipif(bool(_obstacle), reason=f"no cma here: {_obstacle}")


class Source:
    """Memory that holds ``PATTERN`` in another process, and zeros at its address in this one."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.guarded = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = address_of(memoryview(self.memory))
        self.guarded_address = address_of(memoryview(self.guarded))
        self.pid = 0

    def serve(self, link: socket.socket) -> None:
        self.memory[:] = PATTERN
        self.guarded[:] = PATTERN[: 2 * PAGE]
        second_page = ctypes.c_void_p(self.guarded_address + PAGE)
        assert not ctypes.CDLL(None).mprotect(second_page, ctypes.c_size_t(PAGE), PROT_NONE)
        link.send(b"!")
        link.recv(1)  # until the test closes it


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    made = Source()
    with forked(made.serve) as (pid, link):
        made.pid = pid
        assert link.recv(1) == b"!"
        yield made


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, SIZE])
def test_pull_copies_another_process_s_memory(source: Source, size_bytes: int) -> None:
    into = memoryview(bytearray(size_bytes))
    pull(source.pid, source.address, into)
    assert into == PATTERN[:size_bytes]
    assert source.memory[:10] == bytes(10), "this process's own memory was read"


def test_a_dead_process_is_gone() -> None:
    with pytest.raises(OSError, match="no such process"):
        pull(dead_pid(), _ADDRESS, memoryview(bytearray(8)))


def test_memory_that_ends_early_is_read_up_to_there(source: Source) -> None:
    into = memoryview(bytearray(2 * PAGE))
    with pytest.raises(OSError, match=f"cannot read {PAGE} bytes"):
        pull(source.pid, source.guarded_address, into)
    assert into[:PAGE] == PATTERN[:PAGE]


def test_reads_may_be_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    class ShortReads:
        def process_vm_readv(self, pid: int, here: copying._Range, one: int, *rest: object) -> int:
            here.size_bytes = min(here.size_bytes, 1000)
            return int(real.process_vm_readv(pid, here, one, *rest))

    real = copying._libc
    monkeypatch.setattr(copying, "_libc", ShortReads())
    data, into = bytearray(PATTERN[:4567]), memoryview(bytearray(4567))
    pull(os.getpid(), address_of(memoryview(data)), into)
    assert into == data


def test_without_the_system_call_every_pull_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "unavailable", "no such function")
    with pytest.raises(OSError, match="has no such call"):
        pull(os.getpid(), _ADDRESS, memoryview(bytearray(8)))


def test_a_nonce_proves_who_is_read(source: Source) -> None:
    assert find_obstacle(source.pid, source.address, PATTERN[:NONCE_BYTES]) == ""
    assert "other contents" in find_obstacle(os.getpid(), source.address, PATTERN[:16])
    assert "nothing is mapped" in find_obstacle(source.pid, 0x10, PATTERN[:16])
