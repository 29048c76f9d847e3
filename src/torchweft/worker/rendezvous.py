"""How the workers of a group find each other, through a store that all of them reach.

``torchweft.protocol.joining`` decides which keys are written, read and waited for. The
stores are PyTorch's, which ``torchrun`` and every init method already provide. PyTorch's client
waits for the host of a store as well, but longer than it was told, and logs a stack for each
attempt: so this module waits first.

A store may outlive the workers, such as the one in torchrun's agent: a *round* is a fresh part of
it. When torchrun starts its workers again, they meet at the same store, which has the keys of their
former lives. The number of restarts does not tell lives apart: each agent counts only the failures
of its own workers. So rank 0 begins a round with a new random name. The others answer in that
round, each with a random name of its own, and rank 0 confirms the answers. A worker may find the
round of a former life first. But rank 0 of that life is gone, so it never confirms the answer.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout, WeftError
from torchweft.protocol import joining
from torchweft.protocol.joining import (
    Admission,
    Check,
    Get,
    Peek,
    Remove,
    Request,
    Set,
    SetOnce,
    Sign,
    Steps,
    Swap,
    Verify,
    Wait,
)
from torchweft.protocol.registration import Directory, Registration
from torchweft.threads.reports import Notice, subject_of
from torchweft.worker.stores import (
    LAUNCHER_SCHEME,
    BoundedStore,
    SignedStore,
    open_group_file,
    open_launcher_store,
    within,
)

_log = logging.getLogger("torchweft")
T = TypeVar("T")

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
        init_method: ``env://`` (the default), ``tcp://host:port``, ``file:///path``, or what
            ``torchweft run`` tells its workers.
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
    if urlsplit(method).scheme == LAUNCHER_SCHEME:
        return open_launcher_store(urlsplit(method).netloc, timeout_s)
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
        return within(timeout_s, method, lambda: open_group_file(path, timeout_s))
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
    if scheme not in ("env", "tcp", "file", LAUNCHER_SCHEME):
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
    is_hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if place is None or (rank == 0 and not is_hosted_by_launcher):
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


def join(store: Any, registration: Registration, world_size: int, timeout_s: float) -> Directory:
    """Joins a closed group; blocks until all workers have joined, and returns the directory.

    Args:
        store: A store with keys of this group only, whose every operation ends in time.
        registration: This worker's own entry.
        world_size: Number of workers of the group.
        timeout_s: How long to wait for all workers, in seconds.

    Raises:
        RendezvousError: There is no group, see ``joining.join_closed``; or the store has ended.
    """
    notice = Notice(
        subject_of(registration.name), lambda: f"in init_rpc for {_awaited(store, world_size)}"
    )
    token = secrets.token_hex(16)
    steps = joining.join_closed(registration, world_size, token, timeout_s, time.monotonic)
    try:
        return carry_out(steps, functools.partial(perform, store, notice=notice))
    except DistError as error:
        raise RendezvousError(
            f"the rendezvous store does not answer any more: {_first_line(error)}; has the worker "
            "that hosts it, which is rank 0, ended?"
        ) from error


def has_verdict(store: Any) -> bool:
    """Whether rank 0 has written the directory of a closed group, or why there is none."""
    return _is_there(store, joining.DIRECTORY)


def is_incomplete(store: Any) -> bool:
    """Whether rank 0 has written that workers were missing: a later attempt may find them."""
    return has_verdict(store) and bool(Directory.decode(store.get(joining.DIRECTORY)).missing)


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


def note_left(store: Any, worker: int, token: str, *, is_over: bool = True) -> None:
    """Takes a worker that is gone, by id, out of the table for workers that join later.

    Waits for the store for a moment at most.

    Args:
        store: A store with keys of this group only.
        worker: The id of the worker.
        token: The token of the run.
        is_over: Whether its process has ended, or leaves itself.
    """
    bounded = SignedStore(BoundedStore(store, 0.0), None)
    try:
        carry_out(
            joining.leave_open(worker, token, is_over=is_over), functools.partial(perform, bounded)
        )
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


_OPERATIONS: dict[type[Any], Callable[[Any, Any], Any]] = {
    Set: lambda store, asked: store.set(asked.key, asked.value),
    Get: lambda store, asked: bytes(store.get(asked.key)),
    Check: lambda store, asked: bool(store.check([asked.key])),
    Peek: lambda store, asked: store.peek(asked.key),
    Swap: lambda store, asked: store.swap(asked.key, asked.expected, asked.desired),
    Sign: lambda store, asked: store.sign(asked.key, asked.value),
    Verify: lambda store, asked: store.verify(asked.key, asked.text.encode()),
    Remove: lambda store, asked: store.remove(asked.key),
    SetOnce: lambda store, asked: bytes(store.compare_set(asked.key, "", asked.value)),
}


def perform(store: Any, request: Request, notice: Notice | None = None) -> Any:
    """Performs one operation of a rendezvous store; ``notice`` reports a long wait."""
    if isinstance(request, Wait):
        noticed = notice if request.awaited else None
        return _wait_noticing(store, request.key, request.limit_s, noticed)
    return _OPERATIONS[type(request)](store, request)


def _awaited(store: Any, world_size: int) -> str:
    """Describes the workers that an incomplete group waits for."""
    keys = [joining.registration_key(rank) for rank in range(world_size)]
    missing = [f"rank {rank}" for rank, key in enumerate(keys) if not _is_there(store, key)]
    if not missing:
        return "rank 0, which has not answered"
    return f"{', '.join(missing)} of {world_size} to join"


def _wait_noticing(store: Any, key: str, timeout_s: float, notice: Notice | None) -> bool:
    """Waits as ``_wait``, and reports a long wait."""
    end_s = time.monotonic() + timeout_s
    untold_s = math.inf if notice is None else notice.left_s()
    if notice is not None and untold_s < timeout_s:
        if _wait(store, key, untold_s):
            return True
        notice.look()
    return _wait(store, key, end_s - time.monotonic())


def _wait(store: Any, key: str, timeout_s: float) -> bool:
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


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError):
        return False


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


_ROUND = "round"


def is_needed() -> bool:
    """Whether the store of ``env://`` is one that an agent of torchrun keeps."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def agree(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Returns the name of a round that all workers of this life are in.

    If not all workers come in time, the round is not confirmed; joining in it fails, and names the
    missing workers.

    Args:
        store: The store, whose every operation ends in time.
        rank: This worker's rank.
        world_size: Number of workers.
        timeout_s: How long to wait for the others, in seconds.
    """
    end_s = time.monotonic() + timeout_s
    own = secrets.token_hex(8)
    if rank == 0:
        return _lead(store, own, world_size, end_s)
    return _follow(store, own, rank, end_s)


def _lead(store: Any, name: str, world_size: int, end_s: float) -> str:
    store.set(_ROUND, name)
    answers = {str(rank): _answer_key(name, rank) for rank in range(1, world_size)}
    while answers and not store.check(list(answers.values())):
        if time.monotonic() > end_s:
            return name
        time.sleep(_POLL_S)
    confirmed = {rank: bytes(store.get(key)).decode() for rank, key in answers.items()}
    store.set(_confirmation_key(name), json.dumps(confirmed))
    return name


def _follow(store: Any, own: str, rank: int, end_s: float) -> str:
    answered = ""
    while time.monotonic() <= end_s:
        name = bytes(store.get(_ROUND)).decode() if store.check([_ROUND]) else ""
        if name and name != answered:
            store.set(_answer_key(name, rank), own)
            answered = name
        if name and store.check([_confirmation_key(name)]):
            confirmed = json.loads(bytes(store.get(_confirmation_key(name))))
            if confirmed.get(str(rank)) == own:
                return name
        time.sleep(_POLL_S)
    return answered or own


def _answer_key(name: str, rank: int) -> str:
    return f"{name}/answer/{rank}"


def _confirmation_key(name: str) -> str:
    return f"{name}/confirmed"
