"""Joining a group of workers, whose size is known (closed) or not (open), and leaving it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from torchweft import deaths, knobs, scraping, standard_streams
from torchweft.arguments import checked_int, limit_of, wrong_type
from torchweft.engine.codec.tracebacks import without_own_frames
from torchweft.engine.io.addresses import (
    LOOPBACK,
    is_far,
    is_unspecified,
    listen_tcp,
    listen_unix,
    parse,
)
from torchweft.engine.protocol import registration
from torchweft.engine.protocol.connecting import Patience
from torchweft.engine.protocol.joining import (
    Admission,
    Forget,
    Introduce,
    Request,
    introduce,
)
from torchweft.engine.threads.reports import Following, names_of
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker import rendezvous
from torchweft.engine.worker.agent import Agent, Protection
from torchweft.engine.worker.connections import Traffic
from torchweft.engine.worker.peers import Members, Peer
from torchweft.errors import (
    CallTimeout,
    ConfigurationError,
    DuplicateName,
    NotInitialized,
    ProtocolError,
    ShutdownError,
    WeftError,
    WorkerLost,
)
from torchweft.ids import WorkerInfo
from torchweft.notice import heed_notice
from torchweft.probe import network_id, own_address_towards
from torchweft.rpc import serving
from torchweft.rpc.node import Node, current_node, how_ended
from torchweft.rpc.options import (
    Meeting,
    Placement,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    find_placement,
    from_tensorpipe,
    warn_of_ignored,
)
from torchweft.rpc.reporter import group_of
from torchweft.version import VERSION

_log = logging.getLogger("torchweft")

_rounds_over: deque[str] = deque(maxlen=64)
"""The tokens of the closed groups that this process has joined, or been refused by: their store may
outlive them."""
_store_of_failure: Any = None
"""The store at which this process failed to join, until it joins or calls ``shutdown``: if it hosts
the store, workers that come late must find the verdict there."""
NAME_VARIABLE = "WEFT_WORKER_NAME"
INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"
_ENVIRONMENT_METHOD = "env://"
_TELL_LIMIT_S = 2.0
"""Time limit for connecting to the workers that are to be told of a failure."""


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


@without_own_frames
def join_group(
    name: str | None,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    place: Placement | None = None,
) -> None:
    """Makes this process a worker of a group whose size is given: for what starts workers itself.

    Like ``init_rpc``, whose errors it raises, but no launcher that the environment names counts.
    Only a name and a store that are not given are taken from there. Blocks until all workers have
    joined, or in an open group until those that are present know this one.

    Args:
        name: Name of this worker; by default as for ``init_rpc``.
        rank: Its rank.
        world_size: Number of workers; None for an open group.
        options: Its options, which should name a meeting place: a store or an init method.
        place: Where the workers meet if nothing else names a place; by default ``env://``.
    """
    global _store_of_failure
    knobs.check_environment()
    options.check()
    name = _checked_name(name, rank)
    if rank < 0 or (world_size is not None and rank >= world_size):
        fitting = "0 on" if world_size is None else "0 to world_size - 1"
        raise ConfigurationError(
            f"rank {rank} does not fit world_size {world_size}; ranks go from {fitting}"
        )
    standard_streams.reserve_descriptors()
    heed_notice()
    metrics = None
    store = options.store
    try:
        if store is None:
            store = _open_store(rank, world_size, options, place)
        metrics = _listen_for_scrapes(place)
        if world_size is None:
            enter_open(name, rank, store, options)
        else:
            enter_closed(name, rank, world_size, store, options)
    except BaseException:
        if metrics is not None:
            metrics.close()
        if world_size is not None:
            _store_of_failure = store
        raise
    _store_of_failure = None
    if metrics is not None:
        url = metrics.serve().url
        _log.info("worker %r serves its metrics at %s", name, url)


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
    return importlib.import_module("torchweft.observe.metrics").Server(address)


@without_own_frames
def shutdown(
    graceful: bool = True, timeout: float = 0.0, *, error: BaseException | None = None
) -> None:
    """Leaves the group; without one, only closes the store of an ``init_rpc`` that failed.

    A graceful shutdown blocks until all workers have called ``shutdown`` and every call in the
    group has ended; this worker goes on serving meanwhile. Then all references are dropped. If a
    worker is lost or the time is up, it leaves and then raises. In an open group it waits only for
    its own calls and the calls that it serves; the other workers go on.

    Args:
        graceful: Whether to wait for the others. If not, calls that wait for this worker fail.
        timeout: Seconds to wait at most; 0 for no limit.
        error: The error that has ended the program, if one has. Then the worker leaves at once. The
            others get the error as the cause of the loss, also those that are not connected yet.

    Raises:
        ShutdownError: The shutdown was incomplete; names the missing workers and the reason.
    """
    global _store_of_failure
    limit_of(timeout, math.inf)
    if not current_agent.is_set():
        _store_of_failure = None
        return
    if error is not None:
        _leave_failed(error)
    elif graceful:
        leave_group(timeout)
    else:
        current_node().end(farewell="it left by shutdown(graceful=False)")


def leave_group(timeout: float, follow: Following | None = None) -> None:
    """Leaves the group gracefully, as ``shutdown`` does, and has the wait followed.

    Args:
        timeout: Seconds to wait at most; 0 for no limit.
        follow: Returns the ``with`` block in which this worker waits, and which may still make
            calls at its end. It gets a function that returns what the shutdown lacks, as text, and
            the names of the workers that it waits for. By default a long wait is logged.

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


def _leave_failed(error: BaseException) -> None:
    """Leaves the group, and tells the others why. Blocks for ``_TELL_LIMIT_S`` at most."""
    node = current_node()
    agent = node.agent
    agent.lifetime.has_failed = True
    end_s = time.monotonic() + _TELL_LIMIT_S
    for peer in agent.members.present():
        if not peer.is_self and peer.link is None:
            with contextlib.suppress(WeftError):
                agent.connect(peer, end_s)
    node.end(farewell=how_ended(error))


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Returns name and rank of a worker, or of this worker.

    Args:
        worker_name: Its name or rank; None for this worker.

    Raises:
        UnknownWorker: There is no such worker.
    """
    agent = current_agent.current()
    return agent.info if worker_name is None else agent.find(worker_name).info


def caller() -> WorkerInfo:
    """Returns the worker whose call the running code serves; this worker where no call is.

    It is told by the connection: another worker cannot pretend to be it. Tasks of asyncio that a
    function starts serve its call as well; threads that it starts serve none.

    Raises:
        NotInitialized: This process is in no group.
    """
    return serving.caller().info


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
        return find_placement(os.environ)
    except ConfigurationError:
        if rank < 0 or world_size is None:
            raise
        return Placement()


def _found_rank(place: Placement, options: RpcBackendOptions) -> int:
    """Returns the rank that the launcher gave this process, and logs the whole finding."""
    if place.rank is None:
        raise ConfigurationError(
            "rank is not given and environment variable RANK is not set; pass rank=..., or "
            f"{place.meeting.missing}"
        )
    found = place.rank
    if options.store is not None or _given_method(options):
        place = dataclasses.replace(place, meeting=Meeting())
    _log.info("%s", place.sentence)
    return found


def _given_method(options: RpcBackendOptions) -> str:
    """Returns the init method that the program or the user names; empty for the launcher's."""
    method = options.init_method or os.environ.get(INIT_METHOD_VARIABLE, "")
    return "" if method == _ENVIRONMENT_METHOD else method


def _found_method(place: Placement | None) -> str:
    if place is None:
        return _ENVIRONMENT_METHOD
    if place.rank is not None and place.meeting.missing:
        raise ConfigurationError(place.meeting.missing)
    return place.meeting.init_method or _ENVIRONMENT_METHOD


def _open_store(
    rank: int, world_size: int | None, options: RpcBackendOptions, place: Placement | None
) -> Any:
    method = _given_method(options)
    if world_size == 1 and place is not None and not (method or options.init_method):
        return HashStore()  # A worker that is alone needs no meeting place.
    method = method or _found_method(place)
    opened = rendezvous.open_store(method, rank, world_size, options.init_timeout)
    return PrefixStore("weft/0", opened)


def _checked_name(name: str | None, rank: int) -> str:
    if name is None:
        name = os.environ.get(NAME_VARIABLE) or f"worker{rank}"
    return WorkerInfo(name, rank).name


# The making of a worker

_MEETINGS = 32
"""Number of workers to which a newcomer introduces itself at a time."""
_LEAST_MEETING_S = 0.5
"""Least seconds for a worker whose turn comes late: it may be alive."""

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
    with _listening(name, rank, store, options) as (listeners, me, signed):
        directory = rendezvous.join(signed, me, world_size, options.init_timeout, _rounds_over)
        others = [each for each in directory.workers if each.id != rank]
        agent = _make_agent(directory.token, me, others, listeners, options, is_open=False)
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
    with _listening(name, rank, store, options) as (listeners, me, signed):
        admission = rendezvous.enter(signed, me, options.init_timeout)
        agent = _make_agent(admission.token, admission.me, (), listeners, options, is_open=True)
        left = partial(rendezvous.note_left, worker=admission.me.id, token=admission.token)
        node = Node(agent, options, store, left, group_of(admission.token))
    node.start()
    try:
        _introduce(node, signed, admission, start_s + options.init_timeout)
        present = [each.registration for each in agent.members.present()]
        registration.check_devices({each.name: each.devices for each in present}, is_open=True)
        registration.check_versions(present)
    except BaseException:
        rendezvous.note_left(store, admission.me.id, admission.token)
        node.end()
        raise


def _compare_versions(me: registration.Registration, told: set[str], peer: Peer) -> None:
    """Warns of a worker that runs other versions than this worker, once per difference."""
    found = registration.differences(me, peer.registration)
    if found and found not in told:
        told.add(found)
        _log.warning(
            "worker %r has other versions than worker %r, this one: %s; install the same "
            "everywhere if something does not work between them",
            peer.name,
            me.name,
            found,
        )


def _introduce(node: Node, store: Any, admission: Admission, end_s: float) -> None:
    """Introduces this worker and the earlier workers to each other.

    A worker that has not answered by ``end_s`` is declared lost. Raises as ``joining.introduce``.
    """

    def perform_one(request: Request) -> Any:
        if isinstance(request, Introduce):
            return _meet_all(node, end_s, request)
        if isinstance(request, Forget):
            return _forget(node.agent, request)
        return rendezvous.perform(store, request)

    rendezvous.carry_out(introduce(admission), perform_one)


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

    def meet(other: registration.Registration) -> Exception | None:
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
def _listening(name: str, rank: int, store: Any, options: RpcBackendOptions) -> Any:
    """Opens the listening sockets; closes them if the block raises.

    Yields them, the registration of this worker, and the store through which it joins.
    """
    listeners: list[socket.socket] = []
    host, told = _where_to_listen(options, store)
    try:
        unix_listener, unix_address = listen_unix()
        listeners.append(unix_listener)
        tcp_listener, tcp_address = listen_tcp(host, is_secure=options.tls is not None)
        listeners.append(tcp_listener)
        addresses = str(unix_address), str(tcp_address._replace(host=told))
        signed = rendezvous.SignedStore(
            rendezvous.BoundedStore(store, options.init_timeout), options.secret
        )
        yield listeners, _registration(name, rank, addresses, options), signed
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
    store_host = rendezvous.host_of(store)
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
    token: str,
    me: registration.Registration,
    others: Iterable[registration.Registration],
    listeners: list[socket.socket],
    options: RpcBackendOptions,
    *,
    is_open: bool,
) -> Agent:
    _renew_thread_pool()
    _tell_of_loss()
    refuses = options.unmapped_devices == "refuse"
    members = Members(me, others, is_open=is_open, refuses_unmapped=refuses)
    members.on_joined(partial(_compare_versions, me, set()))
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
) -> registration.Registration:
    facts = {
        registration.HOST: socket.gethostname(),
        registration.STRICT: options.strict,
        registration.NETWORK: network_id(),
        registration.IS_FAR: any(is_far(parse(address)) for address in addresses),
        registration.HAS_SECRET: options.secret is not None,
        registration.VERSIONS: {
            registration.PYTHON: ".".join(platform.python_version_tuple()[:2]),
            "torch": str(torch.__version__),
            "Weft": VERSION,
        },
        registration.REFUSES_VERSIONS: options.other_versions == "refuse",
        **options.device_settings().as_facts(),
        **deaths.own_facts(),
    }
    return registration.Registration(name, rank, addresses, _main_program(), facts)


def _main_program() -> str:
    """Returns an identifier of the main program; empty if no other process has the same."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"module {spec.name}"
    path = getattr(main, "__file__", None)
    return f"file {os.path.realpath(path)}" if path and os.path.exists(path) else ""
