"""Files that are complete or absent, and that are verified by their hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

from torchweft.files import open_plain

UNFINISHED = ".tmp"
"""The suffix of a file's name until all of the file is on the disk."""
_CHUNK_BYTES = 4 << 20


class Written(NamedTuple):
    """The identity of a file's content: its size, and the SHA-256 of its bytes."""

    size_bytes: int
    sha256: str


class HashingFile:
    """A file that counts and hashes the bytes written to it.

    After a failed or interrupted write it accepts and drops the rest: the serializer is C++ code,
    which should not be unwound by an exception. ``check`` raises the error afterwards.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._error: BaseException | None = None

    def write(self, data: Any) -> int:
        """Writes bytes; returns how many."""
        size_bytes = memoryview(data).nbytes
        try:
            if self._error is None:
                self._file.write(data)
                self._hash.update(data)
        except BaseException as error:
            # Its frames would form a cycle, partly through memory that no collector sees.
            self._error = error.with_traceback(None)
        self._size_bytes += size_bytes
        return size_bytes

    def flush(self) -> None:
        """Does nothing: the file is flushed once all is written."""

    def check(self) -> Written:
        """Returns the size and hash of the written bytes; raises the error of a failed write."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return Written(self._size_bytes, self._hash.hexdigest())


def write_whole(path: str, write: Callable[[HashingFile], object]) -> Written:
    """Writes a file under a temporary name, waits until it is on the disk, and renames it.

    A file ``path`` is always complete, whenever this process or the machine stops.

    Args:
        path: The final name.
        write: Writes the content into the given file.

    Raises:
        OSError: The disk is full, or another error. There is no file then, unless only the
            directory could not be flushed.
    """
    unfinished = path + UNFINISHED
    try:
        remove_file(unfinished)  # What a process that was killed has left.
        with open(unfinished, "xb") as file:  # Follows no link.
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
    return write_whole(path, lambda file: _serialize(content, file))


def _serialize(content: dict[str, Any], file: HashingFile) -> None:
    """Writes tensors and plain values; an interrupt of the main thread is raised as itself.

    Ctrl-C during the work of the serializer strikes as the next ``write`` is entered, before it can
    note the error. The serializer then ends its file with bytes missing, and raises an error of its
    own about that.
    """
    try:
        torch.save(content, file)  # type: ignore[arg-type]
        return
    except Exception as error:
        interrupt = error.__context__
        if interrupt is None or isinstance(interrupt, Exception):
            raise
    raise interrupt


def flush(file: BinaryIO) -> None:
    """Flushes an open file, and waits until all of it is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(path: str) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(unfinished: str, path: str) -> None:
    """Renames a finished file to its final name, replacing any existing file."""
    os.replace(unfinished, path)


def remove_file(path: str) -> None:
    """Removes a file if there is one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def difference(path: str, expected: Written) -> str:
    """Returns a description of a file's damage; empty if the file is as it was written.

    Raises:
        FileNotFoundError: There is no such file.
    """
    digest = hashlib.sha256()
    size_bytes = 0
    with open_plain(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    if size_bytes != expected.size_bytes:
        return f"it has {size_bytes:,} bytes, {expected.size_bytes:,} were written"
    if digest.hexdigest() != expected.sha256:
        return "its bytes are not those that were written (SHA-256 differs)"
    return ""


def read_part(path: str) -> dict[str, Any]:
    """Returns the content of a part; its tensors are memory-mapped, and read when used."""
    content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return content
