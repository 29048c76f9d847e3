from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from torchweft.engine.channels import shm as layout
from torchweft.engine.channels.shm import SLABS_OFFSET, Area, attach, create
from torchweft.engine.io.ring import create_sealed

MIB = 1 << 20


@pytest.fixture
def made() -> Iterator[tuple[int, Area]]:
    descriptor, area = create(4 * MIB)
    yield descriptor, area
    os.close(descriptor)


def test_both_mappings_are_the_same_memory(made: tuple[int, Area]) -> None:
    descriptor, area = made
    other = attach(descriptor, area.nonce)
    assert other.address != area.address
    area.memory[SLABS_OFFSET + 5] = 7
    other.words[3] = (1 << 64) - 1
    assert other.memory[SLABS_OFFSET + 5] == 7
    assert area.words[3] == (1 << 64) - 1
    assert other.size_bytes == SLABS_OFFSET + 4 * MIB


def test_a_mapping_needs_no_descriptor_and_ends_with_its_last_array() -> None:
    descriptor, area = create(MIB)
    os.close(descriptor)
    part = area.memory[SLABS_OFFSET:][:10]
    address = area.address
    del area
    part[:] = 1
    assert part.sum() == 10
    assert f"{address:x}-" in maps()
    del part
    assert f"{address:x}-" not in maps()


def maps() -> str:
    with open("/proc/self/maps") as file:
        return file.read()


@pytest.mark.parametrize("is_supported", [True, False])
def test_memory_that_is_not_there_is_an_error(
    made: tuple[int, Area], monkeypatch: pytest.MonkeyPatch, is_supported: bool
) -> None:
    _, area = made
    code = errno.ENOMEM if is_supported else errno.EINVAL
    monkeypatch.setattr(layout, "madvise", lambda *arguments: code)
    if is_supported:
        with pytest.raises(MemoryError, match="no shared memory for 4096 bytes"):
            area.populate(SLABS_OFFSET, 4096)
    else:
        area.populate(SLABS_OFFSET, 4096)  # An older kernel: pages are touched one by one.


def test_the_size_cannot_be_changed_any_more(made: tuple[int, Area]) -> None:
    descriptor, _ = made
    for size_bytes in (0, 64 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size_bytes)


def test_memory_that_could_be_cut_off_is_not_used() -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4 * MIB)
        with pytest.raises(OSError, match="not sealed"):
            attach(descriptor, bytes(16))
    finally:
        os.close(descriptor)


def test_memory_too_small_is_not_used() -> None:
    descriptor = create_sealed("test", 4096)
    try:
        with pytest.raises(OSError, match="too few"):
            attach(descriptor, bytes(16))
    finally:
        os.close(descriptor)


def test_a_mapping_that_the_system_refuses_is_an_error(made: tuple[int, Area]) -> None:
    with pytest.raises(OSError, match="cannot map"):
        Area(made[0], 1 << 60)
