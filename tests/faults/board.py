"""Data that the workers of a run share with its injector: training progress, struck faults."""

from __future__ import annotations

import mmap
import struct
import time

_FIELD = struct.Struct("d")
_STRUCK = 8


class Board:
    """Numbers in memory that forked processes share. Each number has one writer."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def close(self) -> None:
        self._memory.close()

    @property
    def step(self) -> int:
        """The step of the training; 0 before the first one."""
        return int(self._get(0))

    @step.setter
    def step(self, value: int) -> None:
        self._put(0, value)

    def strike(self, fault: int) -> None:
        """Notes that a fault has struck, now."""
        self._put(_STRUCK + fault, time.monotonic())

    def struck_s(self, fault: int) -> float | None:
        """Returns when a fault struck, by ``time.monotonic``; None if it has not."""
        return self._get(_STRUCK + fault) or None

    def _get(self, place: int) -> float:
        value: float = _FIELD.unpack_from(self._memory, place * _FIELD.size)[0]
        return value

    def _put(self, place: int, value: float) -> None:
        _FIELD.pack_into(self._memory, place * _FIELD.size, value)
