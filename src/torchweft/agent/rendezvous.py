"""How the workers of a group find each other, through a store that all of them reach.

Every worker writes its registration; rank 0 collects them, checks them, and writes one
directory, or a refusal that says what is wrong. So everybody fails with the same reason, and the
store answers two questions a worker rather than one for every pair. The stores are PyTorch's:
what ``torchrun`` and every init method already provide.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from torchweft.agent.bounded_store import within
from torchweft.agent.launcher_store import SCHEME as OF_LAUNCHER
from torchweft.agent.launcher_store import open_launcher_store
from torchweft.agent.store_host import await_host, name_of
from torchweft.agent.waits import Notice, subject_of
from torchweft.errors import (
    ConfigurationError,
    DuplicateName,
    RendezvousError,
    RendezvousTimeout,
    WeftError,
)
from torchweft.protocol.membership import Directory, Registration, assemble, why_apart

# Rank 0 must be able to tell the others who was missing after its own time is up.
_GRACE_S = 5.0
_ROUNDING_S = 1.0
"""By so much stores are late to notice that a time is up: some count in whole seconds."""
_POLL_S = 0.02
_READ_S = 0.5
"""How long rank 0 waits at most until all others have read that there is no group."""
_LEAST_S = 1.0
"""How long opening a store may take at least, once somebody listens there."""
_IN_USE = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT")


def open_store(init_method: str | None, rank: int, world_size: int | None, timeout_s: float) -> Any:
    """Opens the store that ``init_method`` names.

    Args:
        init_method: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or what
            ``torchweft run`` tells its workers.
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


def check_answers(init_method: str, rank: int, timeout_s: float) -> None:
    """Sees that the host of a TCP store answers, without waiting for anybody else.

    Does nothing where this worker hosts the store itself, or there is no host.

    Raises:
        RendezvousTimeout: Nobody answers there in time.
    """
    if urlsplit(init_method).scheme in ("tcp", "env") and rank > 0:
        open_store(init_method, rank, None, timeout_s)


def why_not_open(
    error: Exception, init_method: str, rank: int, elapsed_s: float
) -> RendezvousError:
    """Returns the error of a worker that could not open the store, with what helps.

    Args:
        error: What PyTorch raised.
        init_method: Where the store is.
        rank: This worker's rank; rank 0 hosts the store of ``tcp://`` and ``env://``.
        elapsed_s: How long it has tried, in seconds.
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
    if scheme not in ("env", "tcp", "file", OF_LAUNCHER):
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
        store: A store with keys of this group only, each of whose operations ends in time.
        registration: This worker's own entry.
        world_size: Number of workers of the group.
        timeout_s: How long to wait for all of them, in seconds.

    Raises:
        RendezvousTimeout: Somebody did not come; says who. Or the store does not answer.
        DuplicateName: Two workers chose the same name.
        RendezvousError: Rank 0 was told another number of workers.
    """
    start_s = time.monotonic()
    rank = registration.id
    notice = Notice(
        subject_of(registration.name), lambda: f"in init_rpc for {_awaited(store, world_size)}"
    )
    try:
        store.set(_key(rank), registration.encode())
        if rank == 0:
            directory = _lead(store, world_size, start_s, timeout_s, notice)
        else:
            directory = _await_directory(store, rank, world_size, start_s, timeout_s, notice)
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


def _lead(
    store: Any, world_size: int, start_s: float, timeout_s: float, notice: Notice
) -> Directory:
    """Makes the directory, or the refusal, as rank 0."""
    mixed = _make_closed(store)
    if mixed:
        directory = Directory("", (), refusal=mixed)
    else:
        try:
            directory = _collect(store, world_size, start_s, timeout_s, notice)
        except RendezvousError as error:  # What somebody wrote is not signed.
            directory = Directory("", (), refusal=str(error))
    store.set("directory", directory.encode())
    if directory.refusal:
        _await_readers(store, world_size)
    return directory


def _collect(
    store: Any, world_size: int, start_s: float, timeout_s: float, notice: Notice
) -> Directory:
    registrations: dict[int, Registration] = {}
    for rank in range(world_size):
        if _wait_noticing(store, _key(rank), start_s + timeout_s - time.monotonic(), notice):
            registrations[rank] = Registration.decode(store.get(_key(rank)))
            apart = why_apart(registrations.values())
            if apart:
                return Directory("", (), refusal=apart)  # More workers would not change that.
    waited_s = time.monotonic() - start_s
    return assemble(registrations, world_size, secrets.token_hex(16), waited_s)


def _await_readers(store: Any, world_size: int) -> None:
    """Waits until those who have come know why there is no group: the store may end with rank 0."""
    end_s = time.monotonic() + _READ_S
    for rank in range(1, world_size):
        if _is_there(store, _key(rank)):
            _wait(store, _told_key(rank), end_s - time.monotonic())


def _await_directory(
    store: Any, rank: int, world_size: int, start_s: float, timeout_s: float, notice: Notice
) -> Directory:
    # Without rank 0 there is nobody who could still write one.
    is_complete = _wait_noticing(store, "directory", timeout_s, notice) or (
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


def _awaited(store: Any, world_size: int) -> str:
    """Returns for whom a group waits that is not complete."""
    missing = [f"rank {rank}" for rank in range(world_size) if not _is_there(store, _key(rank))]
    if not missing:
        return "rank 0, which has not answered"
    return f"{', '.join(missing)} of {world_size} to join"


def _wait_noticing(store: Any, key: str, timeout_s: float, notice: Notice) -> bool:
    """Waits as ``_wait``, and tells of it where it takes long."""
    end_s = time.monotonic() + timeout_s
    untold_s = notice.left_s()
    if untold_s < timeout_s:
        if _wait(store, key, untold_s):
            return True
        notice.look()
    return _wait(store, key, end_s - time.monotonic())


def _wait(store: Any, key: str, timeout_s: float) -> bool:
    """Returns whether ``key`` is there within the time; a time already up still looks once."""
    end_s = time.monotonic() + timeout_s
    if timeout_s > 2 * _ROUNDING_S:
        try:
            store.wait([key], timedelta(seconds=timeout_s - _ROUNDING_S))
            return True
        except RendezvousTimeout:
            raise  # The store itself does not answer.
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
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError):
        return False


def _key(rank: int) -> str:
    return f"worker/{rank}"


def _told_key(rank: int) -> str:
    return f"told/{rank}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
