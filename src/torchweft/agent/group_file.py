"""The rendezvous store of an open group in a file, ``file:///path``.

PyTorch's file store appends each operation to the file, and every process that opens it reads all
of them: joining takes the longer, the more workers have come before. A record that is half written,
since its process was killed, makes every later reader spin. Here the file has only the keys that
are there. Each change writes a new file that takes the place of the old one in one step.

The format is that of PyTorch's file store, since a closed group may try to meet in the same file:
it must find out that this group is open. So are the locks. Programs also have their process group
meet in that file. A file store of PyTorch goes on reading where it has stopped, so changes are
appended, as PyTorch does, for as long as the file has keys of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from torchweft.errors import RendezvousError

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_REGULAR, _REMOVED = b"/", b"-"
"""What stands before a key, and before that in a record that removes it."""
_LOOK_AGAIN_S = 0.02
_OWN = b"weft/"
"""Is in each key of a group; a file store of PyTorch has a key without it from its first moment."""


class GroupFile(Store):
    """Keeps keys and values in a file; thread-safe, and safe if processes are killed.

    Args:
        path: The path of the file, which is made if it is missing.
        timeout_s: How long to wait for the value of a key.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self.path = os.path.realpath(path)
        self._timeout_s = timeout_s
        with self._locked():
            pass  # Finds out whether the file can be made and read.

    def set(self, key: str, value: str | bytes) -> None:
        self._change(lambda values: values.__setitem__(_key(key), _bytes(value)))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits until the key is there."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._change(lambda values: values[_key(key)])

    def add(self, key: str, amount: int) -> int:
        def add_to(values: dict[bytes, bytes]) -> int:
            total = int(values.get(_key(key), b"0")) + amount
            values[_key(key)] = str(total).encode()
            return total

        return self._change(add_to)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Behaves like PyTorch's stores: a missing key equals the empty string."""

        def swap(values: dict[bytes, bytes]) -> bytes:
            current = values.get(_key(key))
            if (current or b"") == _bytes(expected):
                values[_key(key)] = _bytes(desired)
                return _bytes(desired)
            return _bytes(expected) if current is None else current

        return self._change(swap)

    def deleteKey(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return self._change(lambda values: values.pop(_key(key), None) is not None)

    def check(self, keys: Sequence[str]) -> bool:
        return self._change(lambda values: all(_key(key) in values for key in keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: The keys did not come in time.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self.check(keys):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"{', '.join(keys)} did not come within {limit_s:.1f} s")
            time.sleep(min(_LOOK_AGAIN_S, left_s))

    def _change(self, change: Callable[[dict[bytes, bytes]], T]) -> T:
        """Lets ``change`` read and change the values, and writes them if they are others then."""
        with self._locked() as file:
            values = _values_in(file, self.path)
            before = dict(values)
            result = change(values)
            if values != before and all(_OWN in key for key in before):
                self._write(values)
            elif values != before:
                _append(file, before, values)
        return result

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Opens the file, and locks it against other processes, and other threads of this one."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not self._is_current(file):
                    continue  # Another process has put a new file in its place meanwhile.
                yield file
                return
            finally:
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _write(self, values: dict[bytes, bytes]) -> None:
        new = self.path + ".new"
        parts = [part for pair in values.items() for each in pair for part in _record(each)]
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(file, "wb") as writing:
            writing.write(b"".join(parts))
        os.replace(new, self.path)


def _append(file: int, before: dict[bytes, bytes], values: dict[bytes, bytes]) -> None:
    """Writes what has changed behind the other records, in one step."""
    changed = [pair for pair in values.items() if before.get(pair[0]) != pair[1]]
    changed += [(_REMOVED + key, b"") for key in before if key not in values]
    content = b"".join(part for pair in changed for each in pair for part in _record(each))
    os.pwrite(file, content, os.fstat(file).st_size)


def _record(text: bytes) -> tuple[bytes, bytes]:
    return _LENGTH.pack(len(text)), text


def _values_in(file: int, path: str) -> dict[bytes, bytes]:
    """Returns the values in an open file, by key.

    Raises:
        RendezvousError: It is damaged, or has something else in it.
    """
    content = os.pread(file, os.fstat(file).st_size, 0)
    texts: list[bytes] = []
    place = 0
    while place + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size + length
        texts.append(content[place - length : place])
    if place != len(content) or len(texts) % 2:
        raise RendezvousError(
            f"the file {path!r} is no rendezvous store, or is damaged: a process was killed as it "
            "wrote to it. Remove it, or choose another one"
        )
    values: dict[bytes, bytes] = {}
    for key, value in zip(texts[::2], texts[1::2], strict=True):
        if key.startswith(_REMOVED):
            values.pop(key[len(_REMOVED) :], None)
        else:
            values[key] = value
    return values


def _key(key: str) -> bytes:
    return _REGULAR + key.encode()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
