"""Keeps the current input where it survives the end of the process."""

from __future__ import annotations

import mmap
from pathlib import Path

_LENGTH_BYTES = 4
_LIMIT_BYTES = 1 << 20


class LastInput:
    """A file with the last input, written without a system call.

    Args:
        path: The file, which is overwritten.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as file:
            file.truncate(_LIMIT_BYTES)
            self._memory = mmap.mmap(file.fileno(), _LIMIT_BYTES)

    def note(self, data: bytes) -> None:
        """Replaces the content by ``data``."""
        end = _LENGTH_BYTES + len(data)
        self._memory[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._memory[_LENGTH_BYTES:end] = data

    def close(self) -> None:
        """Frees the memory; the file stays."""
        self._memory.close()


def read_last_input(path: Path) -> bytes:
    """Returns the last input, perhaps of a process that has died."""
    content = path.read_bytes()
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return content[_LENGTH_BYTES : _LENGTH_BYTES + size]
