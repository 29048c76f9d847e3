"""What a worker tells of itself, its threads, calls and devices, and of the other workers.

Most workers are never observed, so ``torchweft.rpc`` does not import the modules for observers. A
thread that may wait imports them: not the reader of a connection, and not a signal handler.

A thread that reads connections answers a request for stacks, outside of the slots for user
functions. So it answers while all slots are taken, as long as the interpreter runs Python. If C
code holds the interpreter lock, a signal still works: its handler walks the stacks without it.
"""

from __future__ import annotations

import enum
import faulthandler
import linecache
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import distributed

from torchweft import knobs
from torchweft.engine.channels.channel import UNTRIED
from torchweft.engine.channels.cuda import NO_CUDA
from torchweft.engine.channels.rdma import NO_DEVICE
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.engine.io import addresses
from torchweft.engine.protocol.calls import ServedCall, SimpleRequest, function_name
from torchweft.engine.protocol.numbers import Tombstones
from torchweft.engine.protocol.observing import NumberTable
from torchweft.engine.protocol.registration import ENDED_LIMIT, HOST, NETWORK
from torchweft.engine.threads.interrupts import all_stacks
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Buffer, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import (
    CallTimeout,
    ConfigurationError,
    WorkerLost,
)
from torchweft.free_threading import shared_count
from torchweft.ids import WorkerInfo
from torchweft.probe import own_address_towards
from torchweft.reports import Devices, Route
from torchweft.rpc.watching import Watcher
from torchweft.rpc.worker import WORKER, Worker, current_worker

_MOST_FRAMES = 100
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OWN = (_PACKAGE, threading.__file__, "<string>")
"""Files whose frames lead to the program's frames, in a thread of Weft."""
_IDLE = {vars(Reactor)["_serve"].__code__}


class ThreadFrames(NamedTuple):
    """The stack of one thread.

    Attributes:
        ident: The thread's number.
        name: Its name.
        is_main: Whether it is the main thread.
        stack: All its frames, innermost last.
        frames: The frames from the first one that is not Weft's; empty for an idle thread of Weft.
    """

    ident: int
    name: str
    is_main: bool
    stack: list[FrameType]
    frames: list[FrameType]


def thread_frames() -> list[ThreadFrames]:
    """Returns the stack of each thread of Python but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, stack in all_stacks().items():
        if ident != threading.get_ident():
            frames = [] if stack[-1].f_code in _IDLE else inwards(stack)
            name = names.get(ident, f"thread {ident}")
            found.append(ThreadFrames(ident, name, ident == main, stack, frames))
    return found


def inwards(stack: Sequence[FrameType]) -> list[FrameType]:
    """Returns the frames of a stack from the first one that is not Weft's."""
    start = 0
    while start < len(stack) - 1 and stack[start].f_code.co_filename.startswith(_OWN):
        start += 1
    return list(stack[start:])


def is_own(frame: FrameType) -> bool:
    """Whether a frame is of Weft, not of the program."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def lines(frames: Sequence[FrameType], has_source: bool) -> tuple[str, ...]:
    """Returns the last frames as in a traceback, with the lines of their files if wanted."""
    told = []
    for frame in frames[-_MOST_FRAMES:]:
        path, number = frame.f_code.co_filename, frame.f_lineno
        text = f'  File "{path}", line {number}, in {frame.f_code.co_name}'
        source = source_of(frame) if has_source else ""
        told.append(f"{text}\n    {source}" if source else text)
    return tuple(told)


def source_of(frame: FrameType) -> str:
    """Returns the line of a file that a frame is at; empty if there is no such file."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


NAME = "torchweft.rpc.stacks"
_STANDARD_ERROR = 2


@rebuilds_plain
@dataclass(frozen=True)
class CallStatus:
    """A call of another worker that has not been answered.

    Attributes:
        function: The called function, as ``module.name``.
        caller: Name of the worker that called.
        age_s: Seconds since the call arrived.
        has_begun: Whether the call is running; if not, it is queued.
    """

    function: str
    caller: str
    age_s: float
    has_begun: bool

    def __str__(self) -> str:
        state = "since" if self.has_begun else "waiting in line for"
        return f"{self.function}, called by {self.caller!r}, {state} {self.age_s:.1f} s"


@rebuilds_plain
@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, or of one coroutine.

    Attributes:
        name: The thread's name.
        frames: Its frames, innermost last, as in a traceback, without Weft's frames that lead to
            the program's; empty for a thread of Weft that waits for work.
    """

    name: str
    frames: tuple[str, ...]

    def __str__(self) -> str:
        if not self.frames:
            return f"{self.name}: idle"
        return "\n".join([f"{self.name}:", *self.frames])


@rebuilds_plain
@dataclass(frozen=True)
class WorkerStacks:
    """The calls and stacks of a worker when it was asked.

    Attributes:
        worker: The worker's name.
        pid: Its process id.
        calls: The calls that it serves, oldest first.
        threads: Its threads and coroutines; idle threads come last.
    """

    worker: str
    pid: int
    calls: tuple[CallStatus, ...]
    threads: tuple[ThreadStack, ...]

    def __str__(self) -> str:
        calls = [f"  {call}" for call in self.calls] or ["  none"]
        return "\n".join(
            [f"worker {self.worker!r} (pid {self.pid}) serves these calls:", *calls]
            + [str(thread) for thread in self.threads]
        )


def stacks(worker: str | int | WorkerInfo | None = None, timeout: float = 10.0) -> WorkerStacks:
    """Returns the calls that a worker serves, and its threads' stacks. Blocks.

    The worker answers even while user functions run on all threads that serve calls, but not while
    C code holds the interpreter lock. Then ``kill -USR1 PID`` makes the worker write its stacks to
    its standard error (``WEFT_STACKS_SIGNAL``). ``str`` formats the result for printing::

        for info in rpc.get_worker_infos():
            print(rpc.stacks(info))

    Args:
        worker: Its name, rank or ``WorkerInfo``; None for this worker.
        timeout: Seconds to wait for the answer.

    Raises:
        UnknownWorker: There is no such worker.
        CallTimeout: The worker has not answered in time.
        WorkerLost: The worker was lost.
    """
    agent = current()
    peer = agent.me if worker is None else agent.find(worker)
    return ask(agent.slots[WORKER], peer, timeout)


def ask(worker: Worker, peer: Peer, timeout_s: float) -> WorkerStacks:
    """Returns the report of a worker; raises as ``stacks``."""
    if peer.is_self:
        return stacks_of(worker)
    call = PendingCall(peer.id, peer.name, NAME, timeout_s)
    try:
        worker.agent.calls.ask_and_wait(peer, call, SimpleRequest(_request))
        told: WorkerStacks = worker.result_of(call)
        return told
    except CallTimeout:
        raise CallTimeout(
            f"worker {peer.name!r} has not said within {timeout_s:.1f} s what it is doing: code in "
            "C keeps its interpreter busy, or it is stopped; if it runs, kill -USR1 PID has it "
            "write its stacks to its standard error",
            worker=peer.name,
            call=NAME,
            elapsed_s=call.elapsed_s,
        ) from None


def _request(number: int) -> list[Buffer]:
    return encode_frame(Kind.STACKS, 0, number, b"")


# The report


def stacks_of(worker: Worker) -> WorkerStacks:
    """Returns what ``stacks`` tells, of this worker."""
    agent = worker.agent
    has_source = not agent.me.registration.is_strict
    threads = [ThreadStack(each.name, lines(each.frames, has_source)) for each in thread_frames()]
    for name, frames in worker.coroutines.frames():
        threads.append(ThreadStack(name, lines(frames, has_source)))
    threads.sort(key=lambda thread: not thread.frames)
    return WorkerStacks(agent.info.name, os.getpid(), tuple(calls_of(worker)), tuple(threads))


def calls_of(worker: Worker) -> list[CallStatus]:
    """Returns the calls of others that a worker serves now, oldest first."""
    now_s = time.monotonic()
    return [
        CallStatus(function_of(call), call.peer.name, now_s - call.arrived_s, call.frame is None)
        for call in served_by(worker)
    ]


def served_by(worker: Worker) -> list[ServedCall]:
    """Returns the calls that a worker serves now, oldest first."""
    served = [
        call for peer in list(worker.agent.peers.values()) for call in peer.served.copy().values()
    ]
    calls = dict.fromkeys([*served, *worker.unfinished.copy()])
    return sorted((call for call in calls if not call.has_ended), key=lambda call: call.arrived_s)


def function_of(call: ServedCall) -> str:
    """Returns the name of the function of a served call, even if it was not decoded yet."""
    function, _ = Watcher.request_of(call)
    if isinstance(function, bytes):
        return function.decode(errors="replace").replace(":", ".") or "a function sent by value"
    return function_name(function)


# Numbers of components

Teller = Callable[[], NumberTable]

_numbers = shared_count()

TELLERS: Slot[dict[int, Teller]] = Slot(dict)
"""The components of one worker that tell numbers, by any number."""


def tell(teller: Teller) -> Callable[[], None]:
    """Has observers of this worker, such as ``torchweft top``, shown a table of numbers.

    Args:
        teller: Returns the table. It is called for each report, on some thread of the worker. It
            neither blocks nor takes long. It is kept until the worker leaves its group.

    Returns:
        A function that ends it before; it may be called several times, and by a finalizer.

    Raises:
        NotInitialized: This process is no worker.
    """
    number, tellers = next(_numbers), current().slots[TELLERS]
    tellers[number] = teller

    def end() -> None:
        tellers.pop(number, None)

    return end


# The signal

_answered: int | None = None


def write_stacks_on_signal() -> None:
    """Makes this process write its threads' stacks to standard error on ``WEFT_STACKS_SIGNAL``.

    A handler that the program has set stays. Idempotent. Weft's handler stays until the process
    ends, because leaving a group may be the step that takes long.

    Raises:
        ConfigurationError: There is no such signal.
    """
    global _answered
    number = _chosen_signal()
    is_free = number is not None and signal.getsignal(number) is signal.SIG_DFL
    if number is not None and is_free and _answered is None:
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=True, chain=False)
        _answered = number


def _chosen_signal() -> int | None:
    name = knobs.STACKS_SIGNAL.get()
    if not name:
        return None
    try:
        return signal.Signals[name]
    except KeyError:
        raise ConfigurationError(
            f"environment variable {knobs.STACKS_SIGNAL.variable} is {name!r}, which is no signal; "
            f"set it like {knobs.STACKS_SIGNAL.variable}=SIGUSR2, or empty for none"
        ) from None


# The other workers: which of them live, their health, and callbacks for their loss


class WorkerState(enum.Enum):
    """State of another worker, as seen from this worker."""

    SELF = "this worker"
    UNUSED = "no connection yet"
    CONNECTED = "connected"
    SILENT = "silent"
    """Its machine has not answered for half of ``detection_time``."""
    RECONNECTING = "reconnecting"
    """The connection broke, and is being made again."""
    LOST = "lost"


class WorkerHealth(NamedTuple):
    """Health of one worker, as seen from this worker.

    Attributes:
        worker: Name and rank.
        state: The worker's state.
        silence_s: Seconds since the worker or its machine was last heard; 0 if its end would be
            noticed at once, as on this host, or if there is no connection.
        error: Time and cause of the worker's loss; None if it is not lost.
    """

    worker: WorkerInfo
    state: WorkerState
    silence_s: float
    error: WorkerLost | None

    def __str__(self) -> str:
        text = f"{self.worker.name} (rank {self.worker.id}): {self.state.value}"
        if self.error is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(self.error.since))
            return f"{text} since {clock}: {self.error.cause}"
        return f"{text} for {self.silence_s:.1f} s" if self.silence_s >= 1 else text


def health() -> list[WorkerHealth]:
    """Returns the health of all known workers, by rank; sends nothing, never blocks.

    Includes lost workers until another worker takes their name; excludes departed workers.
    """
    agent = current()
    peers = sorted(agent.members.known(), key=lambda peer: peer.info.id)
    return [health_of(agent, peer) for peer in peers]


def on_worker_lost(callback: Callable[[WorkerLost], None]) -> Callable[[], None]:
    """Calls ``callback`` with the error of each lost worker, once each.

    It runs on a thread of this worker, after all waits for the lost worker have failed; at once
    for workers that are lost already, unless another worker has their name now. Its errors are
    logged. It also runs for a worker that leaves an open group gracefully: the ``cause`` is
    ``"left the group"``.

    Args:
        callback: Is called with a ``WorkerLost``, whose ``worker`` is the name.

    Returns:
        A function that removes the callback.

    Raises:
        NotInitialized: This process is in no group.
    """
    agent = current()
    replaced = agent.members.replaced()
    told = Tombstones(ENDED_LIMIT)
    lock = threading.Lock()

    def tell(peer: Peer) -> None:
        # Race: a worker lost during the registration is found by both ways below.
        with lock:
            is_news = peer.id not in replaced and peer.id not in told
            told.add(peer.id)
        if is_news:
            try:
                callback(peer.lost_error())
            except BaseException:
                log_exception("a callback for the loss of worker %r failed", peer.name)

    agent.on_lost(tell)
    for peer in list(agent.peers.values()):
        if peer.lost is not None:
            agent.reactor.submit(lambda lost, _: tell(lost), peer)
    return lambda: agent.off_lost(tell)


def on_unseen_error(callback: Callable[[BaseException], None]) -> Callable[[], None]:
    """Calls ``callback`` with the error of each failed call whose result nobody has looked at.

    That is a call of this worker, by ``rpc_async`` or ``remote``, whose future or reference was
    dropped. Such errors are also logged, a moment later, and equal ones once. The callback runs on
    a thread of this worker, and may block. Its own errors are logged. Calls that the program has
    cancelled are left out. Errors that are still unseen come when this worker leaves its group.

    Args:
        callback: Is called with the error, as the future would have raised it.

    Returns:
        A function that removes the callback.

    Raises:
        NotInitialized: This process is in no group.
    """
    unseen = current_worker().unseen

    def tell(error: BaseException) -> None:
        callback(error)

    unseen.callbacks = (*unseen.callbacks, tell)

    def remove() -> None:
        unseen.callbacks = tuple(each for each in unseen.callbacks if each is not tell)

    return remove


def health_of(agent: Agent, peer: Peer) -> WorkerHealth:
    """Returns the health of one worker; see ``health``."""
    if peer.is_self:
        return WorkerHealth(peer.info, WorkerState.SELF, 0.0, None)
    if peer.lost is not None:
        return WorkerHealth(peer.info, WorkerState.LOST, 0.0, peer.lost_error())
    link = peer.link
    if link is None:
        return WorkerHealth(peer.info, WorkerState.UNUSED, 0.0, None)
    silence_s = agent.links.silence_s(peer)
    state = WorkerState.CONNECTED
    if link.is_broken:
        state = WorkerState.RECONNECTING
    elif silence_s > agent.links.patience.detection_s / 2:
        state = WorkerState.SILENT
    return WorkerHealth(peer.info, state, silence_s, None)


def info_of(worker: int) -> WorkerInfo:
    """Returns the ``WorkerInfo`` of the worker with an id, as long as it lives.

    An id names one life of a worker; a later life may reuse name and rank.

    Raises:
        WorkerLost: The worker is lost. Another life of it may have its name by now.
    """
    peer = current().peers[worker]
    if peer.lost is not None:
        raise peer.lost_error()
    return peer.info


# Which devices, networks and back ends of collectives a worker has

_ARPHRD_INFINIBAND = "32"
_ACTIVE = "4: ACTIVE"


def find_devices(device: str | None = None, sys: Path = Path("/sys")) -> Devices:
    """Returns the devices of this worker; does not start CUDA.

    Args:
        device: The device that it trains on; by default the GPU that is current, if there is one.
        sys: Where the kernel shows its devices.
    """
    if device is None:
        is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        number = torch.cuda.current_device() if is_started else 0
        device = f"cuda:{number}" if torch.cuda.is_available() else "cpu"
    built = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return Devices(
        socket.gethostname(),
        device,
        tuple(name for name, is_there in built.items() if is_there),
        any(_texts(sys, "class/infiniband/*/ports/*/state", _ACTIVE)),
        _has_ip_over_infiniband(sys),
        _own_address(),
    )


def route_to(worker: str | int | WorkerInfo) -> Route:
    """Returns the way to another worker, as this worker knows it by now; sends nothing.

    Raises:
        NotInitialized: This process is no worker.
        UnknownWorker: There is no such worker.
    """
    agent = current()
    peer = agent.find(worker)
    ours, theirs = agent.me.registration, peer.registration
    is_one_host, is_one_network = (
        ours.facts.get(fact) == theirs.facts.get(fact) for fact in (HOST, NETWORK)
    )
    is_near = is_one_host and is_one_network
    return Route(
        is_one_host,
        is_near,
        "" if is_near else _address_towards(theirs.addresses),
        peer.ways.inline_limit_bytes,
        tuple(peer.ways.sizes()),
        tuple(
            (name, why)
            for name, why in peer.ways.obstacles().items()
            if not (why == UNTRIED or NO_CUDA in why or NO_DEVICE in why)
        ),
    )


def _address_towards(texts: Iterable[str]) -> str:
    """Returns the address of this host on the way to the first of some addresses in a network."""
    for address in map(addresses.parse, texts):
        if isinstance(address, addresses.TcpAddress) and addresses.is_far(address):
            return own_address_towards(address.host)
    return ""


def _own_address() -> str:
    if current_agent.is_set():
        for text in current().me.registration.addresses:
            address = addresses.parse(text)
            if isinstance(address, addresses.TcpAddress) and addresses.is_far(address):
                return address.host
    return addresses.LOOPBACK


def _texts(sys: Path, pattern: str, wanted: str) -> Iterator[Path]:
    """Yields the files whose content is as wanted."""
    for path in sys.glob(pattern):
        try:
            if path.read_text().strip() == wanted:
                yield path
        except OSError:
            continue  # Some files of the kernel cannot be read by all users.


def _has_ip_over_infiniband(sys: Path) -> bool:
    for path in _texts(sys, "class/net/*/type", _ARPHRD_INFINIBAND):
        if any(_texts(path.parent, "operstate", "up")):
            return True
    return False
