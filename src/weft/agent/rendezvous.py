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

from torch.distributed.rendezvous import rendezvous

from weft.agent.launcher_store import SCHEME as OF_LAUNCHER
from weft.agent.launcher_store import open_launcher_store
from weft.errors import (
    ConfigurationError,
    DuplicateName,
    RendezvousError,
    RendezvousTimeout,
)
from weft.protocol.membership import Directory, Registration, assemble

# Rank 0 must be able to tell the others who was missing after its own time is up.
_GRACE_S = 5.0
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
    size = -1 if world_size is None else world_size
    url = f"{method}{separator}rank={rank}&world_size={size}"
    start_s = time.monotonic()
    try:
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
    store.set(_key(registration.id), registration.encode())
    if registration.id == 0:
        mixed = _make_closed(store)
        if mixed:
            directory = Directory("", (), refusal=mixed)
        else:
            directory = _collect(store, world_size, start_s, timeout_s)
        store.set("directory", directory.encode())
    else:
        directory = _await_directory(store, world_size, start_s, timeout_s)
    if not directory.refusal:
        _check_size(directory, world_size)
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


def _collect(store: Any, world_size: int, start_s: float, timeout_s: float) -> Directory:
    registrations: dict[int, Registration] = {}
    for rank in range(world_size):
        if _wait(store, _key(rank), start_s + timeout_s - time.monotonic()):
            registrations[rank] = Registration.decode(store.get(_key(rank)))
    waited_s = time.monotonic() - start_s
    return assemble(registrations, world_size, secrets.token_hex(16), waited_s)


def _await_directory(store: Any, world_size: int, start_s: float, timeout_s: float) -> Directory:
    # Without rank 0 there is nobody who could still write one.
    is_complete = _wait(store, "directory", timeout_s) or (
        _is_there(store, _key(0)) and _wait(store, "directory", _GRACE_S)
    )
    if is_complete:
        return Directory.decode(store.get("directory"))
    missing = tuple(rank for rank in range(world_size) if not _is_there(store, _key(rank))) or (0,)
    elapsed_s = time.monotonic() - start_s
    raise RendezvousTimeout(
        f"the group of {world_size} workers was not complete within {elapsed_s:.1f} s; "
        f"missing: {', '.join(f'rank {rank}' for rank in missing)}",
        missing,
        elapsed_s,
    )


def _wait(store: Any, key: str, timeout_s: float) -> bool:
    """Returns whether ``key`` is there within the time; a time already up still looks once."""
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.01)))
    except (RuntimeError, ValueError):
        return False
    return True


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except (RuntimeError, ValueError):
        return False


def _key(rank: int) -> str:
    return f"worker/{rank}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
