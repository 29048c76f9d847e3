"""Makes a process a worker: of a closed group, whose size is known, or of an open group."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch

from torchweft import knobs
from torchweft.agent import deaths
from torchweft.agent.agent import Agent, Protection
from torchweft.agent.peers import Members, Peer
from torchweft.agent.rendezvous import carry_out, enter, join, note_left, perform
from torchweft.agent.stores import BoundedStore, SignedStore, host_of
from torchweft.errors import (
    CallTimeout,
    ConfigurationError,
    DuplicateName,
    NotInitialized,
    ProtocolError,
    ShutdownError,
    WorkerLost,
)
from torchweft.probe import network_id
from torchweft.protocol.connecting import Patience
from torchweft.protocol.connecting.reaching import HOST, NETWORK
from torchweft.protocol.membership.devices import check_devices
from torchweft.protocol.membership.joining import (
    Admission,
    Forget,
    Introduce,
    NoteLeft,
    Request,
    introduce,
)
from torchweft.protocol.membership.registration import (
    HAS_SECRET,
    IS_FAR,
    PYTHON,
    REFUSES_VERSIONS,
    STRICT,
    VERSIONS,
    Registration,
    check_versions,
    differences,
)
from torchweft.rpc.node import Node
from torchweft.rpc.observed import group_of
from torchweft.rpc.options import RpcBackendOptions
from torchweft.runtime.reports import names_of
from torchweft.transport.addresses import (
    LOOPBACK,
    is_far,
    is_unspecified,
    listen_tcp,
    listen_unix,
    own_address_towards,
    parse,
)
from torchweft.version import VERSION

_MEETINGS = 32
"""Number of workers to which a newcomer introduces itself at a time."""
_LEAST_MEETING_S = 0.5
"""Least seconds for a worker whose turn comes late: it may be alive."""

_log = logging.getLogger("torchweft")
_loaded_by = os.getpid()
_tells_of_loss = False


def enter_closed(
    name: str, rank: int, world_size: int, store: Any, options: RpcBackendOptions
) -> None:
    """Makes this process a worker of a group whose workers join together. Blocks until they have.

    Raises:
        RendezvousError: The group could not be formed; gives the reason.
        ConfigurationError: The device maps, or versions, of the workers do not fit together.
    """
    with _listening(options, store) as (listeners, addresses):
        registration = _registration(name, rank, addresses, options)
        signed = SignedStore(BoundedStore(store, options.init_timeout), options.secret)
        directory = join(signed, registration, world_size, options.init_timeout)
        others = [each for each in directory.workers if each.id != rank]
        members = _members(registration, others, options, is_open=False)
        agent = _make_agent(directory.token, members, listeners, options)
        node = Node(agent, options, store, group=group_of(directory.token))
    node.start()
    if not deaths.are_told_by_launcher():
        agent.reactor.submit(_watch_first, agent)


def _watch_first(agent: Agent, _: object) -> None:
    """Connects to the first worker: then it notices if this worker dies, and this one if it does.

    Workers that have not called each other have no connection, and a worker that runs its own code
    may call nobody.
    """
    first = min(agent.peers.values(), key=lambda peer: peer.info.id)
    ignored = contextlib.suppress(CallTimeout, WorkerLost, NotInitialized)
    if not first.is_self:
        with agent.reactor.idling(), ignored:
            agent.connect(first)


def enter_open(name: str, rank: int, store: Any, options: RpcBackendOptions) -> None:
    """Makes this process a worker of a group that other workers join and leave at any time.

    Blocks until all present workers know this worker.

    Raises:
        DuplicateName: A present worker has the name or the rank.
        ConfigurationError: Its device maps, or versions, and those of the present workers do not
            fit together.
        RendezvousError: The group is closed, the store does not answer, or a present worker
            cannot be reached, as it is on another host.
    """
    start_s = time.monotonic()
    with _listening(options, store) as (listeners, addresses):
        registration = _registration(name, rank, addresses, options)
        signed = SignedStore(BoundedStore(store, options.init_timeout), options.secret)
        admission = enter(signed, registration, options.init_timeout)
        members = _members(admission.me, (), options, is_open=True)
        agent = _make_agent(admission.token, members, listeners, options)
        left = partial(note_left, worker=admission.me.id, token=admission.token)
        node = Node(agent, options, store, left, group_of(admission.token))
    node.start()
    try:
        _introduce(node, signed, admission, start_s + options.init_timeout)
        present = [each.registration for each in members.present()]
        check_devices({each.name: each.devices for each in present}, is_open=True)
        check_versions(present)
    except BaseException:
        note_left(store, admission.me.id, admission.token)
        node.end()
        raise


def _members(
    me: Registration, others: Iterable[Registration], options: RpcBackendOptions, *, is_open: bool
) -> Members:
    refuses = options.unmapped_devices == "refuse"
    return Members(me, others, is_open=is_open, refuses_unmapped=refuses)


class _Versions:
    """Warns of workers that run other versions than this worker, once per difference."""

    def __init__(self, me: Registration) -> None:
        self._me = me
        self._told: set[str] = set()

    def compare(self, peer: Peer) -> None:
        found = differences(self._me, peer.registration)
        if found and found not in self._told:
            self._told.add(found)
            _log.warning(
                "worker %r has other versions than worker %r, this one: %s; install the same "
                "everywhere if something does not work between them",
                peer.name,
                self._me.name,
                found,
            )


def _introduce(node: Node, store: Any, admission: Admission, end_s: float) -> None:
    """Introduces this worker and the earlier workers to each other.

    A worker that has not answered by ``end_s`` is declared lost. Raises as ``joining.introduce``.
    """

    def perform_one(request: Request) -> Any:
        if isinstance(request, Introduce):
            return _meet_all(node, end_s, request)
        if isinstance(request, NoteLeft):
            return note_left(node.store, request.worker, admission.token, is_over=request.is_over)
        if isinstance(request, Forget):
            return _forget(node.agent, request)
        return perform(store, request)

    carry_out(introduce(admission), perform_one)


def _forget(agent: Agent, request: Forget) -> None:
    peer = agent.peers.get(request.other.id)
    if peer is not None:  # Otherwise a later life of it has introduced itself.
        agent.lose(peer, f"it does not answer: {request.error}")
        if deaths.are_told_by_launcher():  # It knows of no worker that does not answer.
            _log.warning("%s", peer.lost)


def _meet_all(node: Node, end_s: float, request: Introduce) -> list[Exception | None]:
    """Introduces this worker to others concurrently; returns an error or None for each."""
    agent = node.agent
    unmet = {other.id: other.name for other in request.others}

    def meet(other: Registration) -> Exception | None:
        try:
            if request.is_namesake:
                return _meet(agent, end_s, Peer(other, main_by_name=False, is_self=False))
            try:
                peer = agent.take_up(other, is_introduced=False)
            except DuplicateName as error:
                return error
            return _meet(agent, end_s, peer)
        finally:
            del unmet[other.id]

    def awaited() -> str:
        return f"in init_rpc for {names_of(unmet.copy().values())} to answer"

    meeting = ThreadPoolExecutor(min(len(unmet), _MEETINGS), f"weft-{agent.info.name}-meeting")
    with node.waits.during(awaited), meeting as pool:
        return list(pool.map(meet, request.others))


def _meet(agent: Agent, end_s: float, peer: Peer) -> Exception | None:
    """Introduces this worker to another; returns an error if that worker is not there.

    Raises:
        DuplicateName: The other worker has this worker's name or rank.
    """
    try:
        agent.introduce(peer, max(end_s - time.monotonic(), _LEAST_MEETING_S))
    except (OSError, ProtocolError) as error:
        return error
    return None


@contextlib.contextmanager
def _listening(options: RpcBackendOptions, store: Any) -> Any:
    """Opens the listening sockets; closes them if the block raises."""
    listeners: list[socket.socket] = []
    host, told = _where_to_listen(options, store)
    try:
        unix_listener, unix_address = listen_unix()
        listeners.append(unix_listener)
        tcp_listener, tcp_address = listen_tcp(host, is_secure=options.tls is not None)
        listeners.append(tcp_listener)
        yield listeners, (str(unix_address), str(tcp_address._replace(host=told)))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _where_to_listen(options: RpcBackendOptions, store: Any) -> tuple[str, str]:
    """Returns the address to listen on, and the address to announce.

    Raises:
        ConfigurationError: This worker is to listen on all addresses, and the address at which
            other workers reach it is unknown.
    """
    store_host = host_of(store)
    towards = own_address_towards(store_host) if store_host else ""
    if not options.listen:
        # Diallers that cannot prove that they have the secret are turned away.
        host = towards if options.secret is not None and towards else LOOPBACK
        return host, host
    if not is_unspecified(options.listen):
        return options.listen, options.listen
    if not towards:
        raise ConfigurationError(
            f"this worker is to listen on {options.listen}, all addresses of its host, which does "
            "not say at which of them others reach it: set WEFT_LISTEN (or listen=) to that one"
        )
    return options.listen, towards


def _make_agent(
    token: str, members: Members, listeners: list[socket.socket], options: RpcBackendOptions
) -> Agent:
    _renew_thread_pool()
    _tell_of_loss()
    members.on_joined(_Versions(members.me.registration).compare)
    return Agent(
        Protection.of_run(token, options.secret, options.tls),
        members,
        listeners,
        options.num_worker_threads,
        options.default_timeout_s,
        Patience(options.detection_time, options.reconnect_time),
    )


def _renew_thread_pool() -> None:
    """Makes PyTorch renew its thread pool in a forked process, while there is one thread.

    PyTorch does so when a thread first computes; two threads at once would abort the process.
    """
    if os.getpid() != _loaded_by:
        torch.set_num_threads(torch.get_num_threads())


def _tell_of_loss() -> None:
    """Makes a launched program say in one line that it ends because another worker has ended.

    The launcher reports how the other worker ended, whose own traceback is on the screen.
    Tracebacks of all workers that waited for it would bury both. Idempotent.
    """
    global _tells_of_loss
    if _tells_of_loss or not deaths.own_facts() or knobs.TRACEBACKS.get() == "full":
        return
    _tells_of_loss = True
    former = sys.excepthook

    def tell(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        loss = _loss_in(error)
        if loss is None:
            former(error_type, error, trace)
        else:
            print(
                f"weft: this worker ends because of another one: {loss} "
                f"({knobs.TRACEBACKS.variable}=full shows where)",
                file=sys.stderr,
            )

    sys.excepthook = tell


def _loss_in(error: BaseException | None) -> WorkerLost | ShutdownError | None:
    """Returns the loss of a worker that led to an error, if one did."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, WorkerLost) or (isinstance(error, ShutdownError) and error.missing):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _registration(
    name: str, rank: int, addresses: tuple[str, ...], options: RpcBackendOptions
) -> Registration:
    facts = {
        HOST: socket.gethostname(),
        STRICT: options.strict,
        NETWORK: network_id(),
        IS_FAR: any(is_far(parse(address)) for address in addresses),
        HAS_SECRET: options.secret is not None,
        VERSIONS: {
            PYTHON: ".".join(platform.python_version_tuple()[:2]),
            "torch": str(torch.__version__),
            "Weft": VERSION,
        },
        REFUSES_VERSIONS: options.other_versions == "refuse",
        **options.device_settings().as_facts(),
        **deaths.own_facts(),
    }
    return Registration(name, rank, addresses, _main_program(), facts)


def _main_program() -> str:
    """Returns an identifier of the main program; empty if no other process has the same."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path and os.path.exists(path) else ""
