"""How the workers of a group find each other, through a store that all of them reach.

``torchweft.engine.protocol.joining`` decides which keys are written, read and waited for. The
stores are PyTorch's, which ``torchrun`` and every init method already provide. PyTorch's client
waits for the host of a store as well, but longer than it was told, and logs a stack for each
attempt: so this module waits first.

PyTorch's stores wait without a limit if their host accepts a connection but never answers. The host
may be stopped or hang, or another program listens there. Such an operation cannot be aborted. So
each operation of a ``BoundedStore`` runs in a thread of its own, which is abandoned when the time
is up. After that the store is not asked again.

PyTorch's stores accept every client. A malicious client could direct the workers to a man in the
middle, which relays the proofs of both sides. So each worker signs its values, along with their
keys, with the secret, and reads only signed values: see ``SignedStore``. The reader must check that
a value belongs to *this* run. Counters, and the presence of keys, are not protected: an attacker
can use them to keep workers from finding each other, and no more.

``GroupFile`` is the store of an open group in a file, ``file:///path``. PyTorch's file store
appends each operation to the file, and every process that opens it reads all of them: joining takes
the longer, the more workers have come before. A record that is half written, since its process was
killed, makes every later reader spin. Here the file has only the keys that are there, and each
change puts a new file in its place in one step. It is ``/path.open``, beside the file of PyTorch's
stores: programs have their process group meet in the same path. A closed group may try to meet
there, too, under any prefix of its keys, and one of both must be told of the other. So the kind of
an open group is also in PyTorch's file, as a record of PyTorch's format.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import json
import logging
import os
import queue
import re
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

# PyTorch's own types leave some of these out, as a build may lack them.
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from torchweft.engine.protocol import joining
from torchweft.engine.protocol.joining import Admission, Request, Steps, Wait
from torchweft.engine.protocol.registration import Directory, Registration
from torchweft.engine.threads.reports import Notice, subject_of
from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout, WeftError
from torchweft.secret import Secret

T = TypeVar("T")

_LATE_S = 2.0
"""Grace period for an answer after the limit, since some stores count in whole seconds."""

_NO_VALUE = "?"
"""A text that no key has."""
_PREFIX = b"signed:"
_SIGNATURE_BYTES = 64  # in hexadecimal
_TOKEN = re.compile(r"/[0-9a-f]{32}\Z")
"""The token of a run at the end of a key, which errors do not show."""

_LOOK_AGAIN_S = 0.02


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
        self.wait = store.wait

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self.sign(key, value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key.

        Raises:
            RendezvousError: The value was not written by a holder of the secret.
        """
        return self.verify(key, bytes(self._store.get(key)))

    def glance(self, key: str) -> str:
        """Returns the text of a key, without its signature, which is not verified."""
        written = bytes(self._store.get(key))
        is_signed = written.startswith(_PREFIX)
        value = written[len(_PREFIX) + _SIGNATURE_BYTES :] if is_signed else written
        return value.decode(errors="replace")

    def set_once(self, key: str, value: str) -> bytes:
        """Sets a key unless it is there; returns its value afterwards. Raises as ``get``."""
        return self.verify(key, bytes(self._store.compare_set(key, "", self.sign(key, value))))

    def has(self, key: str) -> bool:
        """Returns whether a key is there."""
        return bool(self._store.check([key]))

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

    def verify(self, key: str, written: str | bytes) -> bytes:
        """Returns the value in the output of ``sign``, as bytes. Raises as ``get``."""
        written = written.encode() if isinstance(written, str) else written
        is_signed = written.startswith(_PREFIX)
        shown = _TOKEN.sub("", key)
        if self._key is None:
            if is_signed:
                raise RendezvousError(
                    f"the rendezvous store's value of {shown!r} is signed with a secret, and this "
                    "worker has none; give all workers of the group the same (WEFT_SECRET_FILE)"
                )
            return written
        signature, value = _split(written[len(_PREFIX) :])
        if is_signed and self._key.verify(signature, key.encode(), value):
            return value
        raise RendezvousError(
            f"the rendezvous store's value of {shown!r} was not written with the secret of this "
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


_LENGTH = struct.Struct("<I")
"""Stands before each key and each value in the file of PyTorch's stores."""
_OPEN_SUFFIX = ".open"
"""Follows the path of a store in the name of the file of an open group."""


_opened: dict[str, GroupFile] = {}
"""Open stores by path: a PyTorch store that wraps one keeps only its C++ half alive."""
_MOST_OPENED = 16
"""How many of them are kept: a process is in one group at a time."""


class GroupFile(Store):
    """Keeps keys and values in a file; thread-safe, and safe if processes are killed.

    Args:
        path: The path of PyTorch's store. Its file, made if it is missing, is the lock.
        timeout_s: How long to wait for the value of a key.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.path = os.path.realpath(path)
        with self._locked():
            pass  # Finds out whether the file can be made and read.

    def set(self, key: str, value: str | bytes) -> None:
        self._change(lambda values: values.__setitem__(key, _as_text(value)))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits until the key is there."""
        self.wait([key])
        return _as_bytes(self._change(lambda values: values[key]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: The keys did not come in time.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self.check(list(keys)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"{', '.join(keys)} did not come within {limit_s:.1f} s")
            time.sleep(min(_LOOK_AGAIN_S, left_s))

    def add(self, key: str, amount: int) -> int:
        def add_to(values: dict[str, str]) -> int:
            total = int(values.get(key, "0")) + amount
            values[key] = str(total)
            return total

        return self._change(add_to)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Behaves like PyTorch's stores: a missing key equals the empty string.

        Raises:
            RendezvousError: The key is that of a group's kind, and PyTorch's file is damaged.
        """

        def swap(values: dict[str, str]) -> str:
            if values.get(key, "") == _as_text(expected):
                values[key] = _as_text(desired)
            return values.get(key, _as_text(expected))

        if key.rpartition("/")[2] == joining.KIND:  # It is only ever set once.
            with self._locked() as file:
                kind = _kind_in(file, self.path, key, _as_bytes(_as_text(desired)))
            self.set(key, kind)
            return kind
        return _as_bytes(self._change(swap))

    def deleteKey(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return self._change(lambda values: values.pop(key, None) is not None)

    def check(self, keys: Sequence[str]) -> bool:
        return self._change(lambda values: all(key in values for key in keys))

    def _change(self, change: Callable[[dict[str, str]], T]) -> T:
        """Lets ``change`` read and change the values, and writes them if they are others then."""
        path = self.path + _OPEN_SUFFIX
        with self._locked():
            values = _values_in(path)
            before = dict(values)
            result = change(values)
            if values != before:
                with open(f"{path}.new", "w") as new:
                    json.dump(values, new)
                os.replace(new.name, path)
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
                # A process that was forked meanwhile has the lock, too, until it is released.
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False


def _values_in(path: str) -> dict[str, str]:
    """Returns the values in the file of an open group, by key."""
    try:
        with open(path) as file:
            values: dict[str, str] = json.load(file)
            return values
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RendezvousError(
            f"the file {path!r} is no rendezvous store. Remove it, or choose another one"
        ) from error


def _kind_in(file: int, path: str, key: str, kind: bytes) -> bytes:
    """Returns the kind of a group in the file of PyTorch's stores; writes it if it is missing.

    Args:
        file: The file, which is locked.
        path: Its path, for the error.
        key: The key of the kind, with the prefix of the group.
        kind: The kind of the group of this worker.

    Raises:
        RendezvousError: The file is damaged, or has something else in it.
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
    name = b"/" + key.encode()
    there = dict(zip(texts[::2], texts[1::2], strict=True)).get(name)
    if there is None:
        record = b"".join(_LENGTH.pack(len(each)) + each for each in (name, kind))
        os.pwrite(file, record, len(content))  # In one step.
        return kind
    return there


def _as_text(value: str | bytes) -> str:
    """Returns bytes as a text of one character each."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _as_bytes(text: str) -> bytes:
    return text.encode("latin-1")


# How the workers of a group find each other


_log = logging.getLogger("torchweft")

_ROUNDING_S = 1.0
"""How late stores may notice that a time is up: some count in whole seconds."""
_POLL_S = 0.02
_LEAST_S = 1.0
"""Minimum time allowed for opening a store, once its host listens."""
_IN_USE = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")
_HOST_POLL_S = 0.05
_LEAST_ATTEMPT_S = 0.01


def open_store(init_method: str | None, rank: int, world_size: int | None, timeout_s: float) -> Any:
    """Opens the store that ``init_method`` names.

    Args:
        init_method: ``env://`` (the default), ``tcp://host:port`` or ``file:///path``.
        rank: This worker's rank; rank 0 hosts the store of ``tcp://`` and ``env://``.
        world_size: Number of workers; None for an open group.
        timeout_s: Bound of the wait, in seconds.

    Raises:
        ConfigurationError: The method is unknown, or the environment lacks a variable.
        RendezvousTimeout: The store could not be reached in time.
        RendezvousError: Rank 0 cannot host the store at its port.
    """
    method = init_method or "env://"
    _check_method(method)
    if world_size is None and urlsplit(method).scheme == "file":
        return _open_group_file(method, timeout_s)
    separator = "&" if "?" in method else "?"
    # Rank 0 must not wait here for all workers: it could not name the missing ones. Only a file
    # store needs the number of workers: the last worker removes the file.
    size = world_size if world_size and urlsplit(method).scheme == "file" else -1
    url = f"{method}{separator}rank={rank}&world_size={size}"
    start_s = time.monotonic()
    place = name_of(method)
    try:
        await_host(method, rank, timeout_s)
        left_s = max(start_s + timeout_s - time.monotonic(), _LEAST_S)
        timeout = timedelta(seconds=left_s)
        store, _, _ = within(left_s, place, lambda: next(rendezvous(url, timeout=timeout)))
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise why_not_open(error, method, rank, time.monotonic() - start_s) from error
    return store


def _open_group_file(method: str, timeout_s: float) -> Any:
    path = urlsplit(method).path
    try:
        store = within(timeout_s, method, lambda: GroupFile(path, timeout_s))
        _opened.pop(store.path, None)
        _opened[store.path] = store
        for former in list(_opened)[:-_MOST_OPENED]:
            del _opened[former]
        return store
    except RendezvousTimeout:
        raise
    except OSError as error:
        raise RendezvousError(
            f"the rendezvous store {path!r} cannot be used: {error.strerror}; it must be a file "
            "that all workers can write to, in a folder that they can write to"
        ) from error


def check_answers(init_method: str, rank: int, timeout_s: float) -> None:
    """Checks that the host of a TCP store answers, without waiting for other workers.

    Does nothing if this worker hosts the store itself, or if there is no host.

    Raises:
        RendezvousTimeout: The host does not answer in time.
    """
    if urlsplit(init_method).scheme in ("tcp", "env") and rank > 0:
        open_store(init_method, rank, None, timeout_s)


def why_not_open(
    error: Exception, init_method: str, rank: int, elapsed_s: float
) -> RendezvousError:
    """Returns the error of a worker that could not open the store, with advice.

    Args:
        error: What PyTorch raised.
        init_method: Where the store is.
        rank: This worker's rank; rank 0 hosts the store of ``tcp://`` and ``env://``.
        elapsed_s: How long the worker has tried, in seconds.
    """
    place, said = name_of(init_method), _first_line(error)
    if rank == 0 and _IN_USE.search(said):
        return RendezvousError(
            f"rank 0 cannot host the rendezvous store at {place}: another program, perhaps an "
            "earlier run that has not ended, uses that port. Choose another one, the same for all "
            "workers (MASTER_PORT, or the port of init_method), or end that program"
        )
    if rank == 0:
        hint = (
            "rank 0 hosts the store: MASTER_ADDR, or the host of init_method, must be an address "
            "of its own host"
        )
    else:
        hint = "is rank 0 running? It hosts the store; that must be its address"
    return RendezvousTimeout(
        f"rank {rank} could not open the rendezvous store at {place} within {elapsed_s:.1f} s: "
        f"{said}; {hint}",
        missing=() if rank == 0 else (0,),
        elapsed_s=elapsed_s,
    )


def _check_method(method: str) -> None:
    scheme = urlsplit(method).scheme
    if scheme not in ("env", "tcp", "file"):
        raise ConfigurationError(
            f"init_method {method!r} is unknown; use env://, tcp://host:port, file:///path, "
            "or pass a store"
        )
    missing = [name for name in _ENVIRONMENT if scheme == "env" and name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"environment variable {' and '.join(missing)} not set; init method env:// needs it; "
            "start the script with 'torchweft run' or 'torchrun', or pass "
            "init_method='tcp://host:port' in the back-end options"
        )


def is_kept_by_torchrun() -> bool:
    """Whether the store of ``env://`` is one that an agent of torchrun keeps."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def await_host(init_method: str, rank: int, timeout_s: float) -> None:
    """Blocks until a host listens at the store's address in ``init_method``.

    Args:
        init_method: ``env://`` or ``tcp://host:port``; other methods have no host to wait for.
        rank: This worker's rank; rank 0 is the host itself, unless ``torchrun`` is.
        timeout_s: How long to wait, in seconds; a long wait is logged.

    Raises:
        OSError: No host listened in time; the error of the last attempt.
        ValueError: The port is not a number.
    """
    place = _place_of(init_method)
    if place is None or (rank == 0 and not is_kept_by_torchrun()):
        return
    end_s = time.monotonic() + timeout_s
    where = "{}:{}".format(*place)
    notice = Notice(f"rank {rank}", lambda: f"in init_rpc for rank 0 to open the store at {where}")
    while True:
        notice.look()
        try:
            left_s = max(min(end_s - time.monotonic(), notice.left_s()), _LEAST_ATTEMPT_S)
            socket.create_connection(place, timeout=left_s).close()
            return
        except OSError:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(_HOST_POLL_S, left_s))


def name_of(init_method: str) -> str:
    """Returns the address of the store of an init method, for messages."""
    place = _place_of(init_method)
    return init_method if place is None else f"{place[0]}:{place[1]}"


def _place_of(init_method: str) -> tuple[str, int] | None:
    parts = urlsplit(init_method)
    if parts.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
        return parts.hostname, parts.port
    return None


def join(
    store: Any, registration: Registration, world_size: int, timeout_s: float, over: deque[str]
) -> Directory:
    """Joins a closed group; blocks until all workers have joined, and returns the directory.

    Args:
        store: A store with keys of groups of these workers only, whose every operation ends in
            time.
        registration: This worker's own entry.
        world_size: Number of workers of the group.
        timeout_s: How long to wait for all workers, in seconds.
        over: The tokens of the groups that this process has joined, or been refused by.

    Raises:
        RendezvousError: There is no group, see ``joining.join_closed``; or the store has ended.
    """
    awaited: tuple[str, ...] = ()
    notice = Notice(
        subject_of(registration.name),
        lambda: f"in init_rpc for {_missing_of(store, awaited)}",
    )

    def perform_one(request: Request) -> Any:
        nonlocal awaited
        if not (isinstance(request, Wait) and request.awaited):
            return perform(store, request)
        awaited = request.awaited
        untold_s = notice.left_s()
        if untold_s < request.limit_s:
            end_s = time.monotonic() + request.limit_s
            if perform(store, Wait(request.key, untold_s)):
                return True
            notice.look()
            return perform(store, Wait(request.key, end_s - time.monotonic()))
        return perform(store, request)

    steps = joining.join_closed(
        registration,
        world_size,
        secrets.token_hex(16),
        timeout_s,
        time.monotonic,
        over,
        is_kept=is_kept_by_torchrun(),
    )
    try:
        return carry_out(steps, perform_one)
    except DistError as error:
        raise RendezvousError(
            f"the rendezvous store does not answer any more: {_first_line(error)}; has the worker "
            "that hosts it, which is rank 0, ended?"
        ) from error


def enter(store: Any, registration: Registration, timeout_s: float) -> Admission:
    """Registers this worker, which listens already, in an open group; returns its place in it.

    Args:
        store: A store with keys of this group only, whose every operation ends in time.
        registration: This worker's own entry; its id is taken for its rank.
        timeout_s: How long the whole operation may take, in seconds.

    Raises:
        RendezvousError: The group is a closed one, or the store is broken.
        RendezvousTimeout: The store does not answer.
        ConfigurationError: The group has had too many workers.
    """
    end_s = time.monotonic() + timeout_s
    try:
        steps = joining.join_open(registration, secrets.token_hex(16))
        return carry_out(steps, functools.partial(perform, store))
    except WeftError:
        raise
    except (RuntimeError, OSError) as error:
        if time.monotonic() < end_s:
            raise RendezvousError(f"the rendezvous store does not work: {error}") from error
        raise RendezvousTimeout(
            f"the rendezvous store did not answer within {timeout_s:.1f} s: {error}",
            elapsed_s=timeout_s,
        ) from error


def note_left(store: Any, worker: int, token: str) -> None:
    """Takes a worker that leaves, by id, out of the table for workers that join later.

    Waits for the store for a moment at most.

    Args:
        store: A store with keys of this group only.
        worker: The id of the worker.
        token: The token of the run.
    """
    bounded = SignedStore(BoundedStore(store, 0.0), None)
    try:
        carry_out(joining.leave_open(worker, token), functools.partial(perform, bounded))
    except (RuntimeError, OSError, WeftError) as error:
        _log.debug("worker %d could not be taken out of the store: %s", worker, error)


def carry_out(steps: Steps[T], perform: Callable[[Request], Any]) -> T:
    """Runs a machine of ``protocol.joining`` to its end, and returns its result.

    Args:
        steps: The machine.
        perform: Performs a request, and returns the answer.
    """
    try:
        request = next(steps)
        while True:
            try:
                answer = perform(request)
            except BaseException as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def perform(store: SignedStore, request: Request) -> Any:
    """Performs one operation of a rendezvous store."""
    if isinstance(request, Wait):
        return _wait(store, request.key, request.limit_s)
    assert isinstance(request, joining.Ask)
    return getattr(store, request.operation)(request.key, *request.values)


def _missing_of(store: SignedStore, keys: Sequence[str]) -> str:
    """Describes the workers that an incomplete group waits for; each rank has one of the keys."""
    missing = [f"rank {rank}" for rank, key in enumerate(keys) if not _is_there(store, key)]
    if not missing:
        return "rank 0, which has not answered"
    return f"{', '.join(missing)} of {len(keys)} to join"


def _wait(store: SignedStore, key: str, timeout_s: float) -> bool:
    """Returns whether ``key`` is there in time; looks once even if the time is already up."""
    end_s = time.monotonic() + timeout_s
    if timeout_s > 2 * _ROUNDING_S:
        try:
            store.wait([key], timedelta(seconds=timeout_s - _ROUNDING_S))
            return True
        except RendezvousTimeout:
            raise  # The store itself does not answer.
        except WeftError:
            return False  # One of Weft's own stores knows that the key will never come.
        except (RuntimeError, ValueError):
            pass  # The time is up, or the store is gone with its host: checked below.
    while not _is_there(store, key):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(_POLL_S, left_s))
    return True


def _is_there(store: SignedStore, key: str) -> bool:
    try:
        return store.has(key)
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError):
        return False


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
