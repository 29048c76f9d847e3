"""The rendezvous stores of Weft's own: around those of PyTorch, and in place of them.

PyTorch's stores wait without a limit if their host accepts a connection but never answers. The host
may be stopped or hang, or another program listens there. Such an operation cannot be aborted. So
each operation of a ``BoundedStore`` runs in a thread of its own, which is abandoned when the time
is up. After that the store is not asked again.

PyTorch's stores accept every client. A malicious client could direct the workers to a man in the
middle, which relays the proofs of both sides. So each worker signs its values, along with their
keys, with the secret, and reads only signed values: see ``SignedStore``. The reader must check that
a value belongs to *this* run. Counters, and the presence of keys, are not protected: an attacker
can use them to keep workers from finding each other, and no more.

A store in a worker ends with that worker. So for workers which join and leave, the launcher keeps
the keys, see ``torchweft.launch.meeting`` and ``LauncherStore``. Each operation is one request
datagram and one reply datagram, which are received whole or not at all.

``GroupFile`` is the store of an open group in a file, ``file:///path``. PyTorch's file store
appends each operation to the file, and every process that opens it reads all of them: joining takes
the longer, the more workers have come before. A record that is half written, since its process was
killed, makes every later reader spin. Here the file has only the keys that are there. Each change
writes a new file that takes the place of the old one in one step.

The format is that of PyTorch's file store, since a closed group may try to meet in the same file:
it must find out that this group is open. So are the locks. Programs also have their process group
meet in that file. A file store of PyTorch goes on reading where it has stopped, so changes are
appended, as PyTorch does, for as long as the file has keys of others.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

# PyTorch's own types leave some of these out, as a build may lack them.
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from torchweft.errors import RendezvousError, RendezvousTimeout
from torchweft.secret import Secret

T = TypeVar("T")

_LATE_S = 2.0
"""Grace period for an answer after the limit, since some stores count in whole seconds."""

_NO_VALUE = "?"
"""A text that no key has."""
_PREFIX = b"signed:"
_SIGNATURE_BYTES = 64  # in hexadecimal

LAUNCHER_SCHEME = "unix"
_LOOK_AGAIN_S = 0.02
_ANSWER_BYTES = 1 << 18

_opened: dict[str, Store] = {}
"""Open stores by name: a PyTorch store that wraps one keeps only its C++ half alive."""
_MOST_OPENED = 16
"""How many of them are kept: a process is in one group at a time."""


def within(limit_s: float, place: str, operation: Callable[[], T]) -> T:
    """Runs a store operation and returns its result. Blocks for about ``limit_s`` at most.

    Args:
        limit_s: How long the operation may take, in seconds.
        place: Where the store is, for the error.
        operation: Called in a thread of its own; must not hold the interpreter lock as it waits.

    Raises:
        RendezvousTimeout: There was no answer in time.
        Exception: The exception of the operation.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((operation(), None))
        except BaseException as error:
            outcome.put((None, error))

    thread = threading.Thread(target=run, name="weft-store", daemon=True)
    began_s = time.monotonic()
    thread.start()
    try:
        value, error = outcome.get(timeout=max(limit_s, 0.0) + _LATE_S)
    except queue.Empty:
        raise _silent(place, time.monotonic() - began_s) from None
    thread.join()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _silent(place: str, waited_s: float) -> RendezvousTimeout:
    return RendezvousTimeout(
        f"the rendezvous store at {place} does not answer for {waited_s:.1f} s, though something "
        "takes connections there: the process that hosts it (rank 0, or its launcher) is stopped, "
        "its host hangs, or another program has that port. See what runs there, or choose another "
        "port (MASTER_PORT)",
        missing=(0,),
        elapsed_s=waited_s,
    )


def place_of(store: Any) -> str:
    """Returns the address or the file of a store, for messages."""
    store = _underlying(store)
    if isinstance(store, TCPStore):
        return f"{store.host}:{store.port}"
    if isinstance(store, (FileStore, GroupFile)):
        return f"file {store.path}"  # type: ignore[union-attr]
    return f"a {type(store).__name__}"


def host_of(store: Any) -> str:
    """Returns the host of a TCP store, as it was named; empty for other stores."""
    store = _underlying(store)
    return str(store.host) if isinstance(store, TCPStore) else ""


def _underlying(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class BoundedStore:
    """Forwards all operations to another store, and bounds the wait for its answers.

    Each operation raises RendezvousTimeout if the store does not answer in time, and at once after
    the first such failure.

    Args:
        store: A ``torch.distributed.Store``.
        limit_s: Seconds from now by which all operations must end. Later operations get only a
            short grace period.
    """

    def __init__(self, store: Any, limit_s: float) -> None:
        self._store = store
        self._end_s = time.monotonic() + limit_s
        self._place = place_of(store)
        self._silent: RendezvousTimeout | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns an operation of the other store, bounded."""
        operation = getattr(self._store, name)
        return lambda *arguments: self._within(0.0, lambda: operation(*arguments))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Waits for keys; ``timeout`` may end after the deadline of the other operations."""
        least_s = timeout.total_seconds()
        self._within(least_s, lambda: self._store.wait(list(keys), timeout))

    def _within(self, least_s: float, operation: Callable[[], T]) -> T:
        if self._silent is not None:
            raise copy.copy(self._silent)
        limit_s = max(self._end_s - time.monotonic(), least_s)
        try:
            return within(limit_s, self._place, operation)
        except RendezvousTimeout as error:
            self._silent = error
            raise


class SignedStore:
    """Signs the values written to another store, and verifies the values read.

    Args:
        store: A ``torch.distributed.Store``.
        secret: The group's secret. If None, nothing is signed, and signed values are refused.
    """

    def __init__(self, store: Any, secret: Secret | None) -> None:
        self._store = store
        self._key = None if secret is None else secret.derive("rendezvous")
        self.check = store.check
        self.wait = store.wait

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self.sign(key, value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key.

        Raises:
            RendezvousError: The value was not written by a holder of the secret.
        """
        return self.verify(key, bytes(self._store.get(key)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key that is not there; returns its value afterwards. Raises as ``get``."""
        if expected:
            raise ValueError("a signed value cannot be compared")
        there = self._store.compare_set(key, "", self.sign(key, desired))
        return self.verify(key, bytes(there))

    def peek(self, key: str) -> bytes | None:
        """Returns the value of a key, None if it is missing; does not wait. Raises as ``get``."""
        # Stores answer a comparison with the expected text, or with none, if there is no value.
        written = bytes(self._store.compare_set(key, _NO_VALUE, _NO_VALUE))
        return None if written in (b"", _NO_VALUE.encode()) else self.verify(key, written)

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Writes a text that is not signed if a key has another one; returns the resulting text."""
        return bytes(self._store.compare_set(key, expected, desired)).decode(errors="replace")

    def remove(self, key: str) -> None:
        """Removes a key, if the store can."""
        # A store of the program's need not be able to.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            self._store.delete_key(key)

    def sign(self, key: str, value: str | bytes) -> str:
        """Returns a value of a key as it is written, signed."""
        text = value if isinstance(value, str) else value.decode()
        if self._key is None:
            return text
        signature = self._key.sign(key.encode(), text.encode()).hex()
        return f"{_PREFIX.decode()}{signature}{text}"

    def verify(self, key: str, written: bytes) -> bytes:
        """Returns the value in the output of ``sign``, as bytes. Raises as ``get``."""
        is_signed = written.startswith(_PREFIX)
        if self._key is None:
            if is_signed:
                raise RendezvousError(
                    f"the rendezvous store's value of {key!r} is signed with a secret, and this "
                    "worker has none; give all workers of the group the same (WEFT_SECRET_FILE)"
                )
            return written
        signature, value = _split(written[len(_PREFIX) :])
        if is_signed and self._key.verify(signature, key.encode(), value):
            return value
        raise RendezvousError(
            f"the rendezvous store's value of {key!r} was not written with the secret of this "
            "worker: some worker of the group has another secret or none (WEFT_SECRET_FILE), or a "
            "stranger has reached the store"
        )


def _split(content: bytes) -> tuple[bytes, bytes]:
    """Returns a signature and the signed value; a malformed signature becomes empty."""
    try:
        signature = bytes.fromhex(content[:_SIGNATURE_BYTES].decode())
    except ValueError:
        signature = b""
    return signature, content[_SIGNATURE_BYTES:]


def open_launcher_store(name: str, timeout_s: float) -> LauncherStore:
    """Returns the store of the launcher whose socket is called ``name``.

    Args:
        name: The name that the launcher told its workers.
        timeout_s: How long to wait for one answer, or for the value of a key.
    """
    store = LauncherStore(name, timeout_s)
    _keep(name, store)
    return store


def open_group_file(path: str, timeout_s: float) -> GroupFile:
    """Returns the store of an open group in a file; see ``GroupFile``.

    Raises:
        OSError: The file cannot be made or read.
    """
    store = GroupFile(path, timeout_s)
    _keep(store.path, store)
    return store


def _keep(name: str, store: Store) -> None:
    _opened.pop(name, None)
    _opened[name] = store
    for former in list(_opened)[:-_MOST_OPENED]:
        del _opened[former]


class _PolledStore(Store):
    """A store that is asked again and again for keys that are not there.

    Args:
        timeout_s: How long to wait for the value of a key.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits until the key is there."""
        self.wait([key])
        return self._get(key)

    def _get(self, key: str) -> bytes:
        raise NotImplementedError

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: The keys did not come in time, or the store is gone.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self.check(list(keys)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"{', '.join(keys)} did not come within {limit_s:.1f} s")
            time.sleep(min(_LOOK_AGAIN_S, left_s))


class LauncherStore(_PolledStore):
    """Asks the launcher for keys and values; thread-safe. Made by ``open_launcher_store``."""

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._name = name

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def _get(self, key: str) -> bytes:
        return _bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._ask("compare_set", key, _text(expected), _text(desired)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def deleteKey(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return bool(self._ask("delete", key))

    def _ask(self, *request: object) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.settimeout(self._timeout_s if self._timeout_s < math.inf else None)
            asking.bind("")  # the kernel assigns an address for the answer
            try:
                asking.connect(f"\0{self._name}")
                asking.send(json.dumps(request).encode())
                answer = json.loads(asking.recv(_ANSWER_BYTES))
            except OSError as error:
                raise RuntimeError(
                    f"the launcher, which hosts the rendezvous store, does not answer: {error}; "
                    "has 'torchweft run' ended?"
                ) from error
        if "problem" in answer:
            raise RuntimeError(f"the launcher refuses {request[0]}: {answer['problem']}")
        return answer["value"]


# JSON has no bytes; in Latin-1 each character stands for one byte.
def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


_LENGTH = struct.Struct("<I")
_REGULAR, _REMOVED = b"/", b"-"
"""What stands before a key, and before that in a record that removes it."""
_OWN = b"weft/"
"""Is in each key of a group; a file store of PyTorch has a key without it from its first moment."""


class GroupFile(_PolledStore):
    """Keeps keys and values in a file; thread-safe, and safe if processes are killed.

    Args:
        path: The path of the file, which is made if it is missing.
        timeout_s: How long to wait for the value of a key.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.path = os.path.realpath(path)
        with self._locked():
            pass  # Finds out whether the file can be made and read.

    def set(self, key: str, value: str | bytes) -> None:
        self._change(lambda values: values.__setitem__(_key(key), _encoded(value)))

    def _get(self, key: str) -> bytes:
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
            if (current or b"") == _encoded(expected):
                values[_key(key)] = _encoded(desired)
                return _encoded(desired)
            return _encoded(expected) if current is None else current

        return self._change(swap)

    def deleteKey(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return self._change(lambda values: values.pop(_key(key), None) is not None)

    def check(self, keys: Sequence[str]) -> bool:
        return self._change(lambda values: all(_key(key) in values for key in keys))

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


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
