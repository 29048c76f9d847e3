"""How the workers of a group find each other, through a store that all of them reach.

Every worker writes its registration; rank 0 collects them, checks them, and writes one
directory, or a refusal that says what is wrong. So everybody fails with the same reason, and the
store answers two questions a worker rather than one for every pair. The stores are PyTorch's:
what ``torchrun`` and every init method already provide.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from weft.agent.launcher_store import SCHEME as OF_LAUNCHER
from weft.agent.launcher_store import open_launcher_store
from weft.agent.store_host import await_host
from weft.errors import (
    ConfigurationError,
    DuplicateName,
    RendezvousError,
    RendezvousTimeout,
    WeftError,
)
from weft.protocol.membership import Directory, Registration, assemble

# Rank 0 must be able to tell the others who was missing after its own time is up.
_GRACE_S = 5.0
_ROUNDING_S = 1.0
"""By so much stores are late to notice that a time is up: some count in whole seconds."""
_POLL_S = 0.02
_READ_S = 0.5
"""How long rank 0 waits at most until all others have read that there is no group."""
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")


def open_store(init_method: str | None, rank: int, world_size: int | None, timeout_s: float) -> Any:
    """Opens the store that ``init_method`` names.

    Args:
        init_method: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or what
            ``weft run`` tells its workers.
        rank: This worker's rank; rank 0 hosts the store of ``tcp://`` and ``env://``.
        world_size: Number of workers; None for an open group.
        timeout_s: Bound of the wait, in seconds.

    Raises:
        ConfigurationError: The method is none, or the environment lacks something.
        RendezvousTimeout: The store could not be reached in time.
    """
    method = init_method or "env://"
    _check_method(method)
    if urlsplit(method).scheme == OF_LAUNCHER:
        return open_launcher_store(urlsplit(method).netloc, timeout_s)
    separator = "&" if "?" in method else "?"
    # Rank 0 must not wait here until all have come: it could not say who has not. Only a file has
    # to know how many there are, to be removed by the last one.
    size = world_size if world_size and urlsplit(method).scheme == "file" else -1
    url = f"{method}{separator}rank={rank}&world_size={size}"
    start_s = time.monotonic()
    try:
        await_host(method, rank, timeout_s)
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError, OSError) as error:
        elapsed_s = time.monotonic() - start_s
        hint = "is another program using the port?" if rank == 0 else "is rank 0 running?"
        raise RendezvousTimeout(
            f"rank {rank} could not open the rendezvous store {method!r} within "
            f"{elapsed_s:.1f} s: {_first_line(error)}; {hint}",
            missing=() if rank == 0 else (0,),
            elapsed_s=elapsed_s,
        ) from error
    return store


def _check_method(method: str) -> None:
    scheme = urlsplit(method).scheme
    if scheme not in ("env", "tcp", "file", OF_LAUNCHER):
        raise ConfigurationError(
            f"init_method {method!r} is unknown; use env://, tcp://host:port, file:///path, "
            "or pass a store"
        )
    missing = [name for name in _ENVIRONMENT if scheme == "env" and name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"environment variable {' and '.join(missing)} not set; init method env:// needs it; "
            "start the script with 'weft run' or 'torchrun', or pass "
            "init_method='tcp://host:port' in the back-end options"
        )


_KIND, _OPEN, _CLOSED = "kind", "open", "closed"


def make_open(store: Any) -> None:
    """Makes the group of a store an open one, whoever comes first.

    Raises:
        RendezvousError: It is a closed one.
    """
    if store.compare_set(_KIND, "", _OPEN).decode() != _OPEN:
        raise RendezvousError(_mixed(_CLOSED))


def _make_closed(store: Any) -> str:
    """Makes the group of a store a closed one; returns what is in the way, or nothing."""
    # Stores that only closed groups use need not be able to compare.
    if store.check([_KIND]) and store.get(_KIND).decode() == _OPEN:
        return _mixed(_OPEN)
    store.set(_KIND, _CLOSED)
    return ""


def _mixed(there: str) -> str:
    return (
        "RPC group mixes statically and dynamically initialized members which is not supported: "
        f"this group is {there}; pass the same world_size to all its workers, or to none"
    )


def join(store: Any, registration: Registration, world_size: int, timeout_s: float) -> Directory:
    """Registers this worker and waits for the directory of the whole group.

    Args:
        store: A ``torch.distributed.Store`` with keys of this group only.
        registration: This worker's own entry.
        world_size: Number of workers of the group.
        timeout_s: How long to wait for all of them, in seconds.

    Raises:
        RendezvousTimeout: Somebody did not come; says who.
        DuplicateName: Two workers chose the same name.
        RendezvousError: Rank 0 was told another number of workers.
    """
    start_s = time.monotonic()
    try:
        store.set(_key(registration.id), registration.encode())
        if registration.id == 0:
            directory = _lead(store, world_size, start_s, timeout_s)
        else:
            directory = _await_directory(store, registration.id, world_size, start_s, timeout_s)
    except DistError as error:
        raise RendezvousError(
            f"the rendezvous store does not answer any more: {_first_line(error)}; has the worker "
            "that hosts it, which is rank 0, ended?"
        ) from error
    if not directory.refusal:
        _check_size(directory, world_size)
        _check_own(directory, registration)
        return directory
    if directory.missing:
        elapsed_s = time.monotonic() - start_s
        raise RendezvousTimeout(directory.refusal, directory.missing, elapsed_s)
    if directory.has_duplicates:
        raise DuplicateName(directory.refusal)
    raise RendezvousError(directory.refusal)


def _check_size(directory: Directory, world_size: int) -> None:
    if len(directory.workers) != world_size:
        raise RendezvousError(
            f"rank 0 has a group of {len(directory.workers)} workers, this rank one of "
            f"{world_size}; give all the same world_size"
        )


def _check_own(directory: Directory, registration: Registration) -> None:
    """Sees that a directory is of this run: a stranger may have put that of another one there."""
    if directory.workers[registration.id] != registration:
        raise RendezvousError(
            f"the directory of the group does not have rank {registration.id} as it registered: "
            "it is of another run, or two workers have this rank; give each its own, and each run "
            "a store without keys of an earlier one"
        )


def _lead(store: Any, world_size: int, start_s: float, timeout_s: float) -> Directory:
    """Makes the directory, or the refusal, as rank 0."""
    mixed = _make_closed(store)
    if mixed:
        directory = Directory("", (), refusal=mixed)
    else:
        try:
            directory = _collect(store, world_size, start_s, timeout_s)
        except RendezvousError as error:  # What somebody wrote is not signed.
            directory = Directory("", (), refusal=str(error))
    store.set("directory", directory.encode())
    if directory.refusal:
        _await_readers(store, world_size)
    return directory


def _collect(store: Any, world_size: int, start_s: float, timeout_s: float) -> Directory:
    registrations: dict[int, Registration] = {}
    for rank in range(world_size):
        if _wait(store, _key(rank), start_s + timeout_s - time.monotonic()):
            registrations[rank] = Registration.decode(store.get(_key(rank)))
    waited_s = time.monotonic() - start_s
    return assemble(registrations, world_size, secrets.token_hex(16), waited_s)


def _await_readers(store: Any, world_size: int) -> None:
    """Waits until those who have come know why there is no group: the store may end with rank 0."""
    end_s = time.monotonic() + _READ_S
    for rank in range(1, world_size):
        if _is_there(store, _key(rank)):
            _wait(store, _told_key(rank), end_s - time.monotonic())


def _await_directory(
    store: Any, rank: int, world_size: int, start_s: float, timeout_s: float
) -> Directory:
    # Without rank 0 there is nobody who could still write one.
    is_complete = _wait(store, "directory", timeout_s) or (
        _is_there(store, _key(0)) and _wait(store, "directory", _GRACE_S)
    )
    if is_complete:
        directory = Directory.decode(store.get("directory"))
        if directory.refusal:
            store.set(_told_key(rank), "")
        return directory
    elapsed_s = time.monotonic() - start_s
    if not _is_there(store, _key(rank)):
        raise RendezvousTimeout(
            f"the rendezvous store does not answer any more after {elapsed_s:.1f} s; has the "
            "worker that hosts it, which is rank 0, ended?",
            (0,),
            elapsed_s,
        )
    missing = tuple(each for each in range(world_size) if not _is_there(store, _key(each))) or (0,)
    raise RendezvousTimeout(
        f"the group of {world_size} workers was not complete within {elapsed_s:.1f} s; "
        f"missing: {', '.join(f'rank {each}' for each in missing)}",
        missing,
        elapsed_s,
    )


def _wait(store: Any, key: str, timeout_s: float) -> bool:
    """Returns whether ``key`` is there within the time; a time already up still looks once."""
    end_s = time.monotonic() + timeout_s
    if timeout_s > 2 * _ROUNDING_S:
        try:
            store.wait([key], timedelta(seconds=timeout_s - _ROUNDING_S))
            return True
        except WeftError:
            return False  # A store of Weft's own knows that nobody will come.
        except (RuntimeError, ValueError):
            pass  # Or the store is gone, and so is whoever hosts it: to be seen below.
    while not _is_there(store, key):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(_POLL_S, left_s))
    return True


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except (RuntimeError, ValueError):
        return False


def _key(rank: int) -> str:
    return f"worker/{rank}"


def _told_key(rank: int) -> str:
    return f"told/{rank}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
