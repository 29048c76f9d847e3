"""Joining a group of workers, and leaving it."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.agent import current as current_agent
from weft.agent.agent import Agent, Traffic
from weft.agent.peers import Peer
from weft.agent.rendezvous import join, open_store
from weft.errors import ConfigurationError
from weft.ids import WorkerInfo
from weft.protocol.membership import Directory, Registration
from weft.rpc import serving
from weft.rpc.leaving import Leaving
from weft.rpc.options import RpcBackendOptions
from weft.rpc.worker import Worker
from weft.transport.addresses import listen_tcp, listen_unix

_log = logging.getLogger("weft")

# The store of an init method may outlive a group; each group of this process has its own keys.
_group_numbers = itertools.count()
NAME_VARIABLE = "WEFT_WORKER_NAME"
INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of a group. Blocks until all of the group have joined.

    Args:
        name: Name of this worker, unique in the group. By default what ``weft run`` chose, or
            ``worker`` and the rank.
        backend: Accepted for compatibility; there is one.
        rank: Number of this worker, from 0. By default environment variable ``RANK``.
        world_size: Number of workers. By default environment variable ``WORLD_SIZE``.
        rpc_backend_options: Everything else.

    Raises:
        AlreadyInitialized: This process is a worker already.
        ConfigurationError: An argument cannot work, or is missing.
        RendezvousTimeout: Not all workers came in time; says which.
        DuplicateName: Another worker has the same name.
    """
    current_agent.check_unset()
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        raise ConfigurationError(
            f"rpc_backend_options is a {type(options).__name__}; pass "
            "weft.rpc.RpcBackendOptions(...)"
        )
    options.check()
    rank = _from_environment("RANK", "rank", rank)
    world_size = _from_environment("WORLD_SIZE", "world_size", world_size)
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} does not fit world_size {world_size}; ranks go from 0 to world_size - 1"
        )
    name = _checked_name(name, rank)
    store = options.store
    if store is None:
        method = options.init_method or os.environ.get(INIT_METHOD_VARIABLE)
        store = open_store(method, rank, world_size, options.init_timeout)
        store = PrefixStore(f"weft/{next(_group_numbers)}", store)
    _join(name, rank, world_size, store, options)


def _join(name: str, rank: int, world_size: int, store: Any, options: RpcBackendOptions) -> None:
    unix_listener, unix_address = listen_unix()
    listeners = [unix_listener]
    try:
        tcp_listener, tcp_address = listen_tcp(options.listen)
        listeners.append(tcp_listener)
        addresses = (str(unix_address), str(tcp_address))
        registration = Registration(name, rank, addresses, _main_program())
        directory = join(store, registration, world_size, options.init_timeout)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    agent = Agent(
        directory,
        rank,
        _peers(directory, rank),
        listeners,
        options.num_worker_threads,
        options.default_timeout_s,
    )
    # Rank 0 may host the store: it must live for as long as others may still read from it.
    agent.parts[Store] = store
    worker = Worker(agent)
    serving.install(worker)
    leaving = Leaving(worker)
    current_agent.install(agent)
    agent.start([worker.references.tick, leaving.tick, worker.parcels.tick])


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Leaves the group. Does nothing where this process is no worker.

    Gracefully, it blocks until all workers have called ``shutdown`` and every call in the group
    has ended; meanwhile this worker goes on serving. All references are dropped then. It gives
    up, after having left, when a worker is lost or the time is up.

    Args:
        graceful: Whether to wait for the others. Without, calls that wait for this worker fail.
        timeout: Seconds to wait at most; 0 for no limit.

    Raises:
        ShutdownError: It did not end as it should; says which workers were missing and why.
    """
    if not current_agent.is_set():
        return
    agent = current_agent.current()
    worker: Worker = agent.part(Worker)
    problem: Exception | None = None
    try:
        if graceful:
            problem = agent.part(Leaving).wait(timeout)
    finally:
        current_agent.install(None)
        worker.close()
        agent.close()
    if problem is not None:
        raise problem


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Returns name and rank of a worker, or of this one.

    Args:
        worker_name: Its name or rank; None for this worker.

    Raises:
        UnknownWorker: There is no such worker.
    """
    agent = current_agent.current()
    return agent.info if worker_name is None else agent.find(worker_name).info


def get_worker_infos() -> list[WorkerInfo]:
    """Returns all workers of the group, by rank."""
    return [peer.info for peer in current_agent.current().peers]


def traffic() -> Traffic:
    """Returns the bytes that this worker has sent to and received from all others so far."""
    return current_agent.current().traffic()


def is_available() -> bool:
    """Whether RPC can be used here; kept for compatibility."""
    return True


def _peers(directory: Directory, rank: int) -> list[Peer]:
    main = directory.workers[rank].main
    return [
        Peer(
            registration,
            main_by_name=registration.id == rank or (bool(main) and registration.main == main),
            is_self=registration.id == rank,
        )
        for registration in directory.workers
    ]


def _from_environment(variable: str, argument: str, value: int | None) -> int:
    if value is not None and value >= 0:
        return value
    text = os.environ.get(variable)
    if text is None:
        raise ConfigurationError(
            f"{argument} is not given and environment variable {variable} is not set; pass "
            f"{argument}=..., or start the script with 'weft run' or 'torchrun'"
        )
    if not text.isdigit():
        raise ConfigurationError(f"environment variable {variable} is {text!r}, which is no number")
    return int(text)


def _checked_name(name: str | None, rank: int) -> str:
    if name is None:
        name = os.environ.get(NAME_VARIABLE) or f"worker{rank}"
    if not isinstance(name, str) or not name or len(name) > 128 or not name.isprintable():
        raise ConfigurationError(
            f"{name!r} is no name for a worker; it needs 1 to 128 printable characters"
        )
    return name


def _main_program() -> str:
    """Returns what identifies the main program, or nothing where no other process has the same."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path and os.path.exists(path) else ""
