"""Joining a group of workers, and leaving it."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import os
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from torchweft import knobs, scraping, standard_streams
from torchweft.arguments import checked_int, limit_of, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.rpc.bootstrap import enter_closed, enter_open
from torchweft.rpc.node import current_node
from torchweft.rpc.notice import heed
from torchweft.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    from_tensorpipe,
    warn_of_ignored,
)
from torchweft.rpc.placement import Placement, find
from torchweft.serialize.tracebacks import without_own_frames
from torchweft.threads.reports import Following
from torchweft.worker import current as current_agent
from torchweft.worker import rendezvous
from torchweft.worker.connections import Traffic
from torchweft.worker.rendezvous import has_verdict, is_incomplete, open_store
from torchweft.worker.stores import BoundedStore, SignedStore

_log = logging.getLogger("torchweft")

_groups_before = 0
"""How many closed groups this process has joined, or been refused by, through an init method.

Its store may outlive a group, so the keys of each group have this number. All workers must count
the same, also those whose ``init_rpc`` is interrupted: only a verdict of rank 0 counts."""
_store_of_failure: Any = None
"""The store at which this process failed to join, until it joins or calls ``shutdown``: if it hosts
the store, workers that come late must find the verdict there."""
NAME_VARIABLE = "WEFT_WORKER_NAME"
INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"
_ENVIRONMENT_METHOD = "env://"
_LOOK_S = 1.0
"""How long a worker that could not join waits for the store to say why."""


@without_own_frames
def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | TensorPipeRpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of a group.

    With a ``world_size`` the group is closed: this blocks until all workers have joined, and they
    leave together. Without, it is open: this blocks until the present workers know this one.
    Workers may join and leave an open group at any time, also under an old name and rank.

    Without arguments, rank, size and meeting place are those that the launcher has set in the
    environment: ``torchweft run``, ``torchrun``, ``srun``, ``mpirun``, Kubeflow, or variables by
    hand. The logger ``torchweft`` says which were found, at level ``INFO``.

    Args:
        name: Name of this worker, unique in the group. By default the name that ``torchweft run``
            chose, or ``worker`` and the rank.
        backend: Accepted for compatibility; there is one back-end.
        rank: Number of this worker, from 0. By default the launcher's, for instance ``RANK``.
        world_size: Number of workers. By default the launcher's, for instance ``WORLD_SIZE``; if
            there is a ``RANK`` without ``WORLD_SIZE``, the group is open.
        rpc_backend_options: All other options; PyTorch's options are accepted as well. What they
            do not set has Weft's defaults, also for a tensor on a GPU without a device map.

    Raises:
        AlreadyInitialized: This process is a worker already.
        ConfigurationError: An argument is invalid or missing, environment variables contradict
            each other, or the device maps of the workers do not fit together.
        RendezvousTimeout: Not all workers joined in time; names the missing ones.
        DuplicateName: Another worker has the same name, or in an open group the same rank.
    """
    current_agent.check_unset()
    given = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if isinstance(given, TensorPipeRpcBackendOptions):
        warn_of_ignored(given, stacklevel=3)
        options = from_tensorpipe(given)
    elif isinstance(given, RpcBackendOptions):
        options = given
    else:
        raise wrong_type("rpc_backend_options", given, "pass torchweft.rpc.RpcBackendOptions(...)")
    rank = checked_int("rank", rank)
    if world_size is not None:
        world_size = checked_int("world_size", world_size)
    place = _place_of(rank, world_size)
    if rank == -1:  # The default.
        rank = _found_rank(place, options)
    if world_size is None:
        world_size = place.world_size
    join_group(name, rank, world_size, options, place)


def join_group(
    name: str | None,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    place: Placement | None = None,
) -> None:
    """Makes this process a worker of a closed group, or, without a ``world_size``, an open one.

    Like ``init_rpc``, but takes only a name and a store from the environment. The workers meet at
    the address of ``place`` if nothing else names one.
    """
    knobs.check_environment()
    options.check()
    name = _checked_name(name, rank)
    if rank < 0 or (world_size is not None and rank >= world_size):
        fitting = "0 on" if world_size is None else "0 to world_size - 1"
        raise ConfigurationError(
            f"rank {rank} does not fit world_size {world_size}; ranks go from {fitting}"
        )
    standard_streams.reserve_descriptors()
    heed()
    metrics = numbered = None
    try:
        store = options.store
        if store is None:
            method = _given_method(options) or _found_method(place)
            opened = open_store(method, rank, world_size, options.init_timeout)
            # A worker that comes back to an open group must find the same keys.
            store = PrefixStore("weft/0", opened)
            if world_size is not None:
                store = numbered = _numbered(opened, options)
                if method == _ENVIRONMENT_METHOD and rendezvous.is_needed():
                    bounded = BoundedStore(store, options.init_timeout)
                    name_of_round = rendezvous.agree(
                        bounded, rank, world_size, options.init_timeout
                    )
                    store = PrefixStore(name_of_round, store)
        metrics = _listen_for_scrapes(place)
        if world_size is None:
            enter_open(name, rank, store, options)
        else:
            enter_closed(name, rank, world_size, store, options)
    except BaseException:
        if metrics is not None:
            metrics.close()
        if numbered is not None:
            _failed(numbered)
        raise
    current_node().agent.lifetime.has_joined = True
    if numbered is not None:
        _joined()
    if metrics is not None:
        url = metrics.serve(current_node()).url
        _log.info("worker %r serves its metrics at %s", name, url)


def _numbered(opened: Any, options: RpcBackendOptions) -> Any:
    """Returns the part of a store for the next closed group: the first one not given up."""
    global _groups_before
    while True:
        store = PrefixStore(f"weft/{_groups_before}", opened)
        bounded = BoundedStore(store, options.init_timeout)
        if not is_incomplete(SignedStore(bounded, options.secret)):
            return store
        _groups_before += 1


def _joined() -> None:
    global _groups_before, _store_of_failure
    _groups_before += 1
    _store_of_failure = None


def _failed(store: Any) -> None:
    global _groups_before, _store_of_failure
    _store_of_failure = store
    if has_verdict(BoundedStore(store, _LOOK_S)):
        _groups_before += 1


def _listen_for_scrapes(place: Placement | None) -> Any:
    """Listens where ``WEFT_METRICS`` says, before the worker joins; returns None if nowhere."""
    given = knobs.METRICS.get()
    if not given:
        return None
    local_rank = None if place is None else place.local_rank
    if local_rank is None:
        text = os.environ.get("LOCAL_RANK", "")
        local_rank = int(text) if text.isdigit() else 0
    address = scraping.address_in(given, scraping.VARIABLE).plus(local_rank)
    # By its name: it is of a layer above, and imported only where it was asked for.
    serving = importlib.import_module("torchweft.observe.metrics.serving")
    return serving.Listening(address)


@without_own_frames
def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Leaves the group; without one, only closes the store of an ``init_rpc`` that failed.

    A graceful shutdown blocks until all workers have called ``shutdown`` and every call in the
    group has ended; this worker goes on serving meanwhile. Then all references are dropped. If a
    worker is lost or the time is up, it leaves and then raises. In an open group it waits only for
    its own calls and the calls that it serves; the other workers go on.

    Args:
        graceful: Whether to wait for the others. If not, calls that wait for this worker fail.
        timeout: Seconds to wait at most; 0 for no limit.

    Raises:
        ShutdownError: The shutdown was incomplete; names the missing workers and the reason.
    """
    global _store_of_failure
    limit_of(timeout, math.inf)
    if not current_agent.is_set():
        _store_of_failure = None
        return
    if graceful:
        leave(timeout)
    else:
        current_node().end(farewell="it left by shutdown(graceful=False)")


def leave(timeout: float, follow: Following | None = None) -> None:
    """Leaves the group gracefully, as ``shutdown`` does; this process is a worker.

    Args:
        timeout: Seconds to wait at most; 0 for no limit.
        follow: Follows the wait; by default a long wait is logged.

    Raises:
        ShutdownError: The shutdown was incomplete; names the missing workers and the reason.
    """
    node = current_node()
    farewell = "it left before its shutdown() had finished"
    try:
        problem = node.leaving.wait(timeout, follow=follow)
        farewell = "" if problem is None else farewell
    finally:
        node.end(farewell=farewell)
    if problem is not None:
        raise problem


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Returns name and rank of a worker, or of this worker.

    Args:
        worker_name: Its name or rank; None for this worker.

    Raises:
        UnknownWorker: There is no such worker.
    """
    agent = current_agent.current()
    return agent.info if worker_name is None else agent.find(worker_name).info


def get_worker_infos() -> list[WorkerInfo]:
    """Returns all workers of the group, by rank; in an open group, without lost workers.

    Raises:
        NotInitialized: This process is in no group.
    """
    return [peer.info for peer in current_agent.current().members.present()]


def traffic() -> Traffic:
    """Returns the bytes that this worker has exchanged with all other workers so far.

    Raises:
        NotInitialized: This process is in no group.
    """
    return current_agent.current().traffic()


def get_rpc_timeout() -> float:
    """Returns the default timeout of calls, in seconds; 0 for no limit."""
    timeout_s = current_agent.current().default_timeout_s
    return 0.0 if math.isinf(timeout_s) else timeout_s


def is_available() -> bool:
    """Returns True; kept for compatibility."""
    return True


def _place_of(rank: int, world_size: int | None) -> Placement:
    """Returns the place that the launcher gave this process; arguments outweigh contradictions."""
    try:
        return find(os.environ)
    except ConfigurationError:
        if rank < 0 or world_size is None:
            raise
        return Placement()


def _found_rank(place: Placement, options: RpcBackendOptions) -> int:
    """Returns the rank that the launcher gave this process, and logs the whole finding."""
    if place.rank is None:
        raise ConfigurationError(
            "rank is not given and environment variable RANK is not set; pass rank=..., or "
            f"{place.missing}"
        )
    found = place.rank
    if options.store is not None or _given_method(options):
        place = dataclasses.replace(place, init_method="", meeting="")
    _log.info("%s", place.sentence)
    return found


def _given_method(options: RpcBackendOptions) -> str:
    """Returns the init method that the program or the user names; empty for the launcher's."""
    method = options.init_method or os.environ.get(INIT_METHOD_VARIABLE, "")
    return "" if method == _ENVIRONMENT_METHOD else method


def _found_method(place: Placement | None) -> str:
    if place is None:
        return _ENVIRONMENT_METHOD
    if place.rank is not None and place.missing:
        raise ConfigurationError(place.missing)
    return place.init_method or _ENVIRONMENT_METHOD


def _checked_name(name: str | None, rank: int) -> str:
    if name is None:
        name = os.environ.get(NAME_VARIABLE) or f"worker{rank}"
    return WorkerInfo(name, rank).name
