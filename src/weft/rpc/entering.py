"""How a process becomes a worker: of a closed group, whose size is known, or of an open one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from weft.agent import current as current_agent
from weft.agent.admission import Admission, enter, note_left
from weft.agent.agent import Agent
from weft.agent.connector import HOST
from weft.agent.members import Members
from weft.agent.peers import Peer
from weft.agent.protection import Patience, Protection
from weft.agent.rendezvous import join
from weft.agent.signed_store import SignedStore
from weft.errors import ProtocolError
from weft.protocol.membership import STRICT, Registration
from weft.rpc import serving
from weft.rpc.departing import Departing
from weft.rpc.gathering import Gatherings
from weft.rpc.leaving import Leaving
from weft.rpc.options import RpcBackendOptions
from weft.rpc.worker import Worker
from weft.transport.addresses import listen_tcp, listen_unix

END_LIMIT_S = 5.0
_MEETINGS = 32
"""With how many others a newcomer makes itself known at a time."""
_LEAST_MEETING_S = 0.5
"""Time for those whose turn comes late: they may be there."""

_log = logging.getLogger("weft")
_loaded_by = os.getpid()


def enter_closed(
    name: str, rank: int, world_size: int, store: Any, options: RpcBackendOptions
) -> None:
    """Makes this process a worker of a group whose workers join together. Blocks until they have.

    Raises:
        RendezvousError: There is no group; says why.
    """
    with _listening(options) as (listeners, addresses):
        registration = _registration(name, rank, addresses, options)
        signed = SignedStore(store, options.secret)
        directory = join(signed, registration, world_size, options.init_timeout)
        others = [each for each in directory.workers if each.id != rank]
        members = Members(registration, others, is_open=False)
        worker = _make_worker(directory.token, members, listeners, store, options)
    leaving = Leaving(worker)
    _start(worker, [leaving.tick])


def enter_open(name: str, rank: int, store: Any, options: RpcBackendOptions) -> None:
    """Makes this process a worker of a group that others join and leave while it works.

    Blocks until all that are there know this worker.

    Raises:
        DuplicateName: A worker that is there has the name or the rank.
        RendezvousError: The group is a closed one, or the store does not answer.
    """
    start_s = time.monotonic()
    with _listening(options) as (listeners, addresses):
        registration = _registration(name, rank, addresses, options)
        signed = SignedStore(store, options.secret)
        admission = enter(signed, registration, options.init_timeout)
        members = Members(admission.me, (), is_open=True)
        worker = _make_worker(admission.token, members, listeners, store, options)
    Departing(worker, store, admission.place)
    _start(worker, [])
    try:
        _introduce(worker.agent, store, admission, start_s + options.init_timeout)
    except BaseException:
        note_left(store, admission.place)
        end(worker)
        raise


def end(worker: Worker) -> None:
    """Makes this process no worker any more, at once: what still waits gets an error.

    Ends within about ``END_LIMIT_S``, whatever functions of the program and other workers do.
    """
    end_s = time.monotonic() + END_LIMIT_S
    worker.has_left = True
    current_agent.install(None)
    worker.agent.part(Gatherings).close()
    worker.references.close()
    worker.close(END_LIMIT_S)
    worker.agent.close(max(end_s - time.monotonic(), 0.0))


def _introduce(agent: Agent, store: Any, admission: Admission, end_s: float) -> None:
    """Makes this worker and those who came earlier known to each other.

    Who has not answered at ``end_s`` is taken for lost.

    Raises:
        DuplicateName: One of them lives and has this one's name or rank. Nobody else is told.
    """
    others = []
    for place, earlier in admission.earlier.items():
        if earlier.name == agent.info.name or earlier.rank == agent.info.id:
            _meet(agent, end_s, Peer(earlier, main_by_name=False, is_self=False))
            note_left(store, place)
        else:
            others.append(earlier)
    if not others:
        return
    peers = [agent.take_up(earlier) for earlier in others]
    # All at a time: some may be on hosts that are gone, and do not even refuse.
    with ThreadPoolExecutor(min(len(peers), _MEETINGS), f"weft-{agent.info.name}-meeting") as pool:
        problems = list(pool.map(functools.partial(_meet, agent, end_s), peers))
    for peer, problem in zip(peers, problems, strict=True):
        if problem is not None:
            agent.lose(peer, f"it does not answer: {problem}")
            _log.warning("%s", peer.lost)


def _meet(agent: Agent, end_s: float, peer: Peer) -> Exception | None:
    """Introduces this worker to another; returns why that is not there.

    Raises:
        DuplicateName: It has this one's name or rank.
    """
    try:
        agent.introduce(peer, max(end_s - time.monotonic(), _LEAST_MEETING_S))
    except (OSError, ProtocolError) as error:
        return error
    return None


@contextlib.contextmanager
def _listening(options: RpcBackendOptions) -> Any:
    """Opens the sockets that others connect to; closes them where the block raises."""
    listeners: list[socket.socket] = []
    try:
        unix_listener, unix_address = listen_unix()
        listeners.append(unix_listener)
        tcp_listener, tcp_address = listen_tcp(options.listen, is_secure=options.tls is not None)
        listeners.append(tcp_listener)
        yield listeners, (str(unix_address), str(tcp_address))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _make_worker(
    token: str,
    members: Members,
    listeners: list[socket.socket],
    store: Any,
    options: RpcBackendOptions,
) -> Worker:
    _renew_thread_pool()
    agent = Agent(
        Protection.of_run(token, options.secret, options.tls),
        members,
        listeners,
        options.num_worker_threads,
        options.default_timeout_s,
        Patience(options.detection_time, options.reconnect_time),
    )
    # Rank 0 may host the store: it must live for as long as others may still read from it.
    agent.parts[Store] = store
    worker = Worker(agent, options)
    serving.install(worker)
    Gatherings(agent)
    return worker


def _start(worker: Worker, jobs: Iterable[Callable[[float], float]]) -> None:
    current_agent.install(worker.agent)
    worker.agent.start([worker.references.tick, worker.parcels.tick, *jobs])


def _renew_thread_pool() -> None:
    """Has PyTorch make a new thread pool in a forked process, while there is one thread.

    It does so when a thread first computes; two that do at the same time would abort the process.
    """
    if os.getpid() != _loaded_by:
        torch.set_num_threads(torch.get_num_threads())


def _registration(
    name: str, rank: int, addresses: tuple[str, ...], options: RpcBackendOptions
) -> Registration:
    facts = {HOST: socket.gethostname(), STRICT: options.strict}
    return Registration(name, rank, addresses, _main_program(), facts)


def _main_program() -> str:
    """Returns what identifies the main program, or nothing where no other process has the same."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path and os.path.exists(path) else ""
