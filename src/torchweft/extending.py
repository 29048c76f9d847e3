"""Hooks for applications and tools that are written on Weft, by Weft itself or by others.

A program needs ``torchweft.rpc`` and its like. An application, such as a replicated counter or the
tables of ``torchweft.embedding``, needs a little more of the worker in which it runs: who calls,
which workers there are, where its own state of this worker belongs, and how its numbers get into
``torchweft top``. This module has that, and an application imports nothing else of the engine.
``docs/extending.md`` leads through one.

No function here sends anything, and none blocks, unless its description says so. All are
thread-safe. Those that need a worker raise ``NotInitialized`` in a process that is none.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from _thread import get_ident
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torchweft.arguments import UNSET_RPC_TIMEOUT
from torchweft.autograd.contexts import current_id as context_id_here
from torchweft.engine.codec import objects, registry
from torchweft.engine.codec.functions import describe as function_name
from torchweft.engine.codec.functions import name_of
from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.io.secure import TlsOptions
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import ServedStreams
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import THREADS
from torchweft.engine.worker import current as of_process
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.current import is_set as is_worker
from torchweft.engine.worker.tensor_messages import own_copy
from torchweft.errors import WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.optim.distributed import Failure, run_on_owners
from torchweft.reports import Report, Wait
from torchweft.rpc import serving
from torchweft.rpc.calls import Future, ignore_errors, open_calls, start
from torchweft.rpc.joining import join_group, leave_group
from torchweft.rpc.node import current_node
from torchweft.rpc.observed import find_devices, on_worker_lost, route_to
from torchweft.rpc.observed import tell as tell_numbers
from torchweft.rpc.options import find_placement
from torchweft.rpc.ports import PORTS, Ports
from torchweft.rpc.reporter import REPORTER
from torchweft.rpc.serving import (
    WhenReady,
    check_caller,
    check_types,
    owned,
    serves_another_strictly,
)
from torchweft.rpc.watching import IncomingCall, Message, OutgoingCall, Watcher
from torchweft.rpc.worker import WORKER, current_worker
from torchweft.secret import Secret

__all__ = [
    "Failure",
    "IncomingCall",
    "Member",
    "Message",
    "OutgoingCall",
    "Packed",
    "PerWorker",
    "Watcher",
    "caller",
    "check_called",
    "check_caller",
    "check_types",
    "credentials",
    "device_mark",
    "find_devices",
    "find_worker",
    "function_name",
    "ignore_errors",
    "is_open_group",
    "is_worker",
    "join_group",
    "launched_place",
    "leave_group",
    "log_exception",
    "may_take_long",
    "on_leave",
    "own_report",
    "ports",
    "present_workers",
    "rebuilds_plain",
    "remotely_callable",
    "route_to",
    "run_in_background",
    "run_on_owners",
    "served_call",
    "served_streams",
    "serves_another_strictly",
    "start_call",
    "tell_losses",
    "tell_numbers",
    "this_worker",
    "waiting",
    "watch",
    "when_ready",
    "worker_of",
    "working_for",
]

T = TypeVar("T")


# The workers of the group


class Member(Protocol):
    """One life of a worker of the group, as this worker sees it.

    A worker that was started again has the name and the rank of its former life, and is another
    ``Member``. Compare members by ``id``.
    """

    @property
    def id(self) -> int:
        """The number of this life, which no other life has; ``RRef.id.owner`` of its values."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and rank, to call it by: ``rpc_async(member.info, ...)``."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def host(self) -> str:
        """What its host is known by, the same for all workers of a host; else its own name."""

    @property
    def is_self(self) -> bool:
        """Whether it is this worker."""

    @property
    def lost(self) -> WorkerLost | None:
        """When and why it was lost; None while it lives. Raise ``lost_error()``, not this."""

    def lost_error(self) -> WorkerLost:
        """Returns a fresh error for a use of a member that is lost or leaves."""


def this_worker() -> Member:
    """Returns this worker.

    Raises:
        NotInitialized: This process is no worker.
    """
    return current().me


def find_worker(to: str | int | WorkerInfo) -> Member:
    """Returns the worker that a name, a rank or a ``WorkerInfo`` means now, lost or not.

    Raises:
        UnknownWorker: There is no such worker.
    """
    return current().find(to)


def worker_of(life: int) -> Member:
    """Returns the worker with the number of a life, such as ``RRef.id.owner``, lost or not.

    Raises:
        KeyError: This worker has never known that life.
    """
    return current().peers[life]


def present_workers() -> Sequence[Member]:
    """Returns the workers of the group by rank; in an open group, without lost workers."""
    return current().members.present()


def tell_losses(listener: T, tell: Callable[[T, WorkerLost], object]) -> None:
    """Has lost workers told to an object as long as it lives; nothing is kept for that.

    Args:
        listener: The object, to which there are weak references.
        tell: Called with the object and the loss, after the calls to the lost worker have failed.
    """
    reference = weakref.ref(listener)

    def call(error: WorkerLost) -> None:
        found = reference()
        if found is not None:
            tell(found, error)

    weakref.finalize(listener, on_worker_lost(call)).atexit = False


def launched_place() -> tuple[int | None, int | None, int | None, int | None]:
    """Returns the place that the launcher gave this process, which may be no worker yet.

    It is where ``init_rpc`` without arguments would put this process.

    Returns:
        The rank, the number of workers in the group, the rank among the workers of this host, and
        their number; None for what the launcher has not told.

    Raises:
        ConfigurationError: Environment variables contradict each other, or cannot be read.
    """
    place = find_placement(os.environ)
    return place.rank, place.world_size, place.local_rank, place.local_world_size


def is_open_group() -> bool:
    """Returns whether workers may join and leave later; else all workers are known by now."""
    return current().members.is_open


# The state and the work of a component on this worker


class PerWorker(Generic[T]):
    """An object of a component that each worker has once; a constant of the component's module.

    It is made when it is first asked for, and belongs to one membership: a process that leaves its
    group and joins another one has a new object. The worker owns it, and drops it when it has left.

    Args:
        make: Makes the object, without arguments. Runs under a lock: it must neither block nor ask
            for another such object.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._slot = Slot(make)

    def get(self) -> T:
        """Returns the object of this worker.

        Raises:
            NotInitialized: This process is no worker.
        """
        return current().slots[self._slot]


def run_in_background(function: Callable[..., None], *args: Any) -> None:
    """Has a thread of this worker run a function soon; does not wait for it.

    The thread is one of those that run calls of others, of which there are ``num_worker_threads``.
    The function may block in calls. An error that it raises is logged. A finalizer may call this.

    Args:
        function: Called with ``args``.
        args: Its arguments, which are kept until then.
    """
    current().reactor.submit_task(_run, (function, args))


def _run(work: tuple[Callable[..., None], tuple[Any, ...]], _: object) -> None:
    function, args = work
    function(*args)


def on_leave(end: Callable[[], None]) -> Callable[[], None]:
    """Has a function called when this worker leaves its group, by the thread that leaves.

    Args:
        end: Called without arguments, once. It blocks for a moment at most.

    Returns:
        A function that takes it back; it may be called several times.
    """
    ends = current_node().on_end
    key = object()
    ends[key] = end

    def forget() -> None:
        ends.pop(key, None)

    return forget


# The call that the running function serves


def caller() -> Member:
    """Returns the worker whose call the running code serves; this worker where no call is.

    It is told by the connection: another worker cannot pretend to be it. The threads that a
    function starts serve no call.
    """
    return serving.caller()


def check_called(function: Callable[..., Any]) -> None:
    """Checks that this worker runs a function that another worker calls, or has sent.

    A component uses it before it runs a function for its caller; or where others would fail later,
    and perhaps unseen, because the program has not registered the function.

    Raises:
        NotAllowed: This worker refuses calls of it; names the option that admits it.
    """
    reader = current_worker().reader
    if reader.is_strict:
        reader.check_called(function)
    elif reader.is_restricted:
        name = name_of(function, main_by_name=True)
        if name is not None:
            reader.resolve(name)


def served_call() -> object:
    """Returns the call that the running code serves, to be passed to ``working_for``; or None."""
    return current_call.get()


@contextlib.contextmanager
def working_for(call: Any) -> Iterator[None]:
    """Has this thread, one of the component, work for a call within a ``with`` block.

    Reports say so, which is how ``torchweft explain`` finds out who waits for whom. The thread gets
    as many threads of PyTorch as the program has set: ``torch.set_num_threads`` is of the thread
    that calls it.

    Args:
        call: As ``served_call`` returned it on the thread that served the call.
    """
    THREADS.follow()
    agent, thread = of_process.here, get_ident()
    if agent is None:  # The worker has left, and nobody asks for reports.
        yield
        return
    serving = agent.slots[WORKER].serving
    serving[thread] = call
    try:
        yield
    finally:
        del serving[thread]


def when_ready(
    number: Any, then: Callable[[Any], tuple[Callable[..., Any], Callable[[], Any]]]
) -> Any:
    """Returns the result of a function whose work begins when a value of this worker is there.

    No thread waits for the value, which ``rpc.remote`` may still be making. The function gets the
    number of a reference, which the caller keeps until it is answered: a reference among the
    arguments would be counted.

    Args:
        number: ``RRef.id`` of a value of this worker, as another worker has sent it.
        then: Called with the value. Returns the function of the program that does the work, by
            which reports and traces name the call, and what does it and returns the result.

    Returns:
        What the function must return.
    """

    def named(value: Any) -> tuple[Callable[..., Any], Any]:
        function, work = then(value)
        served = current_call.get()
        if served is not None:
            served.function = function_name(function).encode()
        return function, work()

    return WhenReady(owned(number), named)


def rebuilds_plain(kind: T) -> T:
    """Lets every worker, strict ones too, take objects of a class in messages; a decorator.

    An object travels as the values of the class's ``__match_args__``, which are plain, and is made
    anew of them: ``kind(*values)``. Named tuples and dataclasses are such classes. Another worker
    may send any plain values in their place. So making an object must do no more than keep them,
    and a function that gets one checks what is in it. The module is imported by both workers: no
    message causes its import.

    Args:
        kind: A class at the top level of a module.

    Returns:
        The same class.
    """
    return registry.rebuilds_plain(kind)


# Calls that carry the name of what they run, and values that are packed once


def start_call(
    to: Member,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float = UNSET_RPC_TIMEOUT,
    name: str | None = None,
) -> Future[Any]:
    """Starts a call as ``rpc_async`` does, on this life of a worker and on no later one.

    Args:
        to: The worker.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: As for ``rpc_async``.
        name: The name of the call in errors, reports and traces; by default the function's.
    """
    return start(current_worker(), to, function, args, kwargs or {}, timeout, name)  # type: ignore[arg-type]


class Packed(objects.Packed):
    """A value that is packed once, so that each of several workers can unpack it, now or later.

    Each reference in a value is counted when it is sent, so a packed value with ``externals`` is
    neither sent nor kept.

    Attributes:
        payload: Its bytes.
        tensors: The tensors that were taken out of it.
        externals: The references that were taken out of it.
    """

    __slots__ = ()

    @classmethod
    def of(cls, value: object, workers: Collection[Member]) -> Packed:
        """Packs a value.

        Args:
            value: What a call could have as an argument.
            workers: The workers; this one may be among them.

        Raises:
            SerializationError: A part of the value cannot be sent to one of the workers.
        """
        return cls(*current_worker().encoder.pack_for(workers, value))  # type: ignore[arg-type]

    def unpack(self) -> Any:
        """Makes the value anew, with copies of its tensors, as if a message had brought it.

        In an autograd context the copies stay in the graph. What another worker has packed is read
        in a call of that worker, as its messages are: a strict worker refuses what it may not
        contain.
        """
        worker, context_id = current_worker(), context_id_here()
        keeps_graphs = worker.arrivals.keeps_graphs
        tensors = [own_copy(each, context_id, keeps_graphs) for each in self.tensors]
        read = objects.unpack if caller().is_self else worker.reader.unpack
        return read(self.payload, tensors, self.externals)


# Messages without calls, and waits for them


def ports() -> Ports:
    """Returns the ports of this worker, to which other workers post values.

    A post is a message to a port, whose number both workers know. It costs less than a call, since
    nobody answers it. Values of one sending thread arrive in order. A group that shuts down does
    not wait for them.
    """
    return current().slots[PORTS]


def may_take_long() -> None:
    """Has other threads read messages from now on, as this one is busy with what one has brought.

    For functions that run when an answer arrives, such as the callback of a future.
    """
    current().reactor.arm_all()


def waiting(waits: Callable[[], Sequence[Any]]) -> AbstractContextManager[object]:
    """Returns a ``with`` block in which this thread blocks until another worker does something.

    Another call of others may run on a further thread meanwhile, so that workers which wait for one
    another do not run out of threads; and reports show for what the thread waits.

    Args:
        waits: Returns what is awaited: futures of calls, and a ``Wait`` of ``torchweft.reports``
            of anything else. It is called by other threads, and does not block.
    """
    agent = of_process.here
    return nullcontext() if agent is None else agent.reactor.waiting(partial(_parts, waits))


def _parts(waits: Callable[[], Sequence[Any]]) -> list[Any]:
    awaited = waits()
    return [*open_calls(awaited), *[each for each in awaited if isinstance(each, Wait)]]


# For tools that observe


def own_report(question: str) -> Report:
    """Returns what this worker tells of itself, and has its calls counted for a while.

    Args:
        question: One of ``REPORT``, ``DETAIL`` and ``METRICS`` of ``torchweft.reports``.
    """
    return current().slots[REPORTER].observed(question)


def watch(watcher: Watcher) -> Callable[[], None]:
    """Has a watcher hear of what this worker does from now on, from any thread.

    Args:
        watcher: Has the methods that are called. They neither block nor raise.

    Returns:
        A function that ends it; it may be called several times.
    """
    return current_worker().watch(watcher)


def credentials() -> tuple[Secret | None, TlsOptions | None]:
    """Returns by what this worker proves itself to others: its secret, and how it does TLS."""
    options = current_node().options
    return options.secret, options.tls


# The order of GPU work between threads


def device_mark() -> Callable[..., None]:
    """Returns a function behind the GPU work of this thread so far, for another thread.

    The other thread gets it with a value, and calls it with the value before it uses that: further
    GPU work of the calling thread waits for the work before the mark, and the memory of the value
    is kept until then. The call does not block. Values are tensors, or tuples, lists and
    dictionaries of them, as many as there are. Without GPUs nothing happens.
    """
    if not device_streams.HAS_CUDA:
        return _wait_for_nothing
    return partial(device_streams.use, device_streams.mark())


def _wait_for_nothing(*values: Any) -> None:
    """Stands for a mark in a process without GPU work."""


def served_streams() -> ServedStreams:
    """Returns the streams on which the GPU work of this worker's threads runs.

    In a process that is no worker they are new ones.

    They are for a thread of the component: ``served_streams().carried(function)`` runs the function
    there on a stream of its own, behind the work of the thread that calls ``carried``. A thread
    that lives long calls ``attach`` once, ``renew`` of the result before each piece of work, and
    ``close`` at its end.
    """
    agent = of_process.here
    return ServedStreams() if agent is None else agent.served_streams
