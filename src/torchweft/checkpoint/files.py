"""Files that are there as a whole or not at all, and that are known again by their hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

UNFINISHED = ".tmp"
"""What the name of a file ends with until all of it is on the disk."""
_CHUNK_BYTES = 4 << 20


class Written(NamedTuple):
    """What tells a file from any other: its size, and the SHA-256 of its bytes."""

    size_bytes: int
    sha256: str


class HashingFile:
    """A file that counts and hashes what is written to it.

    After a write has failed it takes and drops the rest: what serializes into it is C++ code, that
    is better not unwound by an exception. ``check`` raises the error afterwards.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes bytes; returns how many."""
        size_bytes = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                # Its frames would lead back here, partly through memory that no collector sees.
                self._error = error.with_traceback(None)
            self._hash.update(data)
        self._size_bytes += size_bytes
        return size_bytes

    def flush(self) -> None:
        """Does nothing: the file is flushed when all is written."""

    def check(self) -> Written:
        """Returns what was written, or raises what went wrong."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return Written(self._size_bytes, self._hash.hexdigest())


def write_whole(path: str, write: Callable[[HashingFile], object]) -> Written:
    """Writes a file under another name, waits until the disk has it, and gives it its name.

    Whoever finds a file ``path`` finds all of it, whenever this process or the machine stops.

    Args:
        path: Its name.
        write: Writes the content into the file that it is passed.

    Raises:
        OSError: The disk is full, or anything else; there is no file then.
    """
    unfinished = path + UNFINISHED
    try:
        with open(unfinished, "wb") as file:
            hashing = HashingFile(file)
            write(hashing)
            written = hashing.check()
            flush(file)
        rename(unfinished, path)
    except BaseException:
        remove_file(unfinished)
        raise
    flush_directory(os.path.dirname(path))
    return written


def write_part(path: str, content: dict[str, Any]) -> Written:
    """Writes tensors and plain values, whole; see ``write_whole``."""
    return write_whole(path, lambda file: torch.save(content, file))  # type: ignore[arg-type]


def flush(file: BinaryIO) -> None:
    """Waits until the disk has all of an open file."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(path: str) -> None:
    """Waits until the disk has the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(unfinished: str, path: str) -> None:
    """Gives a finished file its name; another one of that name is replaced."""
    os.replace(unfinished, path)


def remove_file(path: str) -> None:
    """Removes a file if there is one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def difference(path: str, expected: Written) -> str:
    """Returns what is wrong with a file, nothing if it is as it was written.

    Raises:
        FileNotFoundError: There is no such file.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    if size_bytes != expected.size_bytes:
        return f"it has {size_bytes:,} bytes, {expected.size_bytes:,} were written"
    if digest.hexdigest() != expected.sha256:
        return "its bytes are not those that were written (SHA-256 differs)"
    return ""


def read_part(path: str) -> dict[str, Any]:
    """Returns what ``write_part`` wrote; its tensors are mapped, and read when they are used."""
    content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return content
