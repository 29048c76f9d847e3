"""Makes calls of functions, and of the values behind references; the futures of their results.

Calls are events of PyTorch's profilers, named as PyTorch names them. An event belongs to the
caller: only a profiler on the callee records what the callee does meanwhile. The event of
``rpc_sync`` and ``rpc_async`` lasts until the call has ended; that of ``remote`` until the call was
sent, since no answer is awaited. A class of references may watch the making of the value, and end
the event then (``Handle.end_event``). A call looks at
``torch.autograd.profiler._is_profiler_enabled``, which is True during a profile of this or any
other thread: that is one look at a variable, and no function.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import queue
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from torchweft.arguments import UNSET_RPC_TIMEOUT, kind_of, limit_of, wrong_type
from torchweft.engine.codec.exceptions import fresh_copy
from torchweft.engine.codec.functions import text_of
from torchweft.engine.codec.tracebacks import drop_frames, shorten
from torchweft.engine.protocol import calls
from torchweft.engine.protocol.calls import Subject, nest
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.worker import current as of_process
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall, current_call
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle
from torchweft.errors import ArgumentTypeError, CallCancelled, CallTimeout, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.rpc.codec import Request
from torchweft.rpc.serving import remaining_time
from torchweft.rpc.worker import WORKER, Guard, Worker

if TYPE_CHECKING:
    from typing_extensions import Self

Destination = str | int | WorkerInfo

FETCH = b"torchweft.rpc.serving:fetch"
CALL_METHOD = b"torchweft.rpc.serving:call_method"
BACKWARD_FROM = b"torchweft.rpc.serving:backward_from"


def use(
    reference: Handle, way: str, entry: Any, args: Any, kwargs: Any, timeout: float, name: str
) -> Any:
    """Calls the owner of the value behind a reference, in one of the three ways.

    Args:
        reference: The reference.
        way: ``sync``, ``async`` or ``remote``.
        entry: A function that takes the parts of the reference, what keeps it, and ``args``.
        args: Further arguments.
        kwargs: Keyword arguments.
        timeout: As for ``rpc_sync``.
        name: The name of the use, for messages and profilers.

    Raises:
        OwnerLost: The owner is lost.
    """
    agent = reference.agent()
    worker = agent.slots[WORKER]
    peer = agent.peers[reference.id.owner]
    # No caller waits for a ``remote`` call, so the reference itself goes along to keep the value.
    kept = reference if way == "remote" else None
    call_args = (*reference.id, kept, *args)
    subject = (worker.references.describe_use, reference.id, name)
    try:
        result = _WAYS[way](worker, peer, entry, call_args, kwargs, timeout, subject)
    except WorkerLost as error:
        if peer.lost is None or error.worker != peer.name:
            raise  # By the function that was to make the value, or by the method.
        raise worker.references.owner_lost(reference.id) from None
    if way == "async":
        result.kept = reference  # until it is answered
    return result


def reach(to: Destination) -> tuple[Agent, Peer]:
    """Returns the agent of this process, and the worker that a name, rank or ``WorkerInfo`` means.

    Raises:
        NotInitialized: See ``worker.current.current``.
        UnknownWorker: There is no such worker; see ``Members.find``.
    """
    agent = of_process.here or of_process.current()
    peer = agent.peers_by_name.get(to) if type(to) is str else None
    return agent, peer or agent.find(to)


def checked_call(
    function: Callable[..., Any], args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """Returns the function and its normalized arguments, or raises ArgumentTypeError."""
    if not callable(function):
        fix = "pass the function itself, and its arguments as args=(...)"
        raise wrong_type("func", function, fix)
    if args is None:
        args = ()
    elif not isinstance(args, (tuple, list)):
        fix = "pass a tuple, args=(value,) for a single argument"
        raise ArgumentTypeError(f"args is {kind_of(args)}; {fix}")
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, dict):
        raise wrong_type("kwargs", kwargs, "pass a dict")
    return function, args, kwargs


def _new_call(worker: Worker, peer: Peer, called: Any, timeout: float) -> tuple[PendingCall, bytes]:
    """Returns a call that will be answered, and the span that it carries.

    Raises:
        CallCancelled: It would be part of a call that was given up.
    """
    limit_s = worker.agent.default_timeout_s
    if timeout is not UNSET_RPC_TIMEOUT:
        limit_s = limit_of(timeout, limit_s)
    parent = current_call.get()
    if parent is not None:
        parent, limit_s = nest(parent, peer.name, called, limit_s, monotonic())
    call = PendingCall(peer.id, peer.name, called, limit_s, None, parent)
    return call, worker.note_call(call) if worker.watchers else b""


def call_and_wait(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | str | None = None,
) -> Any:
    """Calls ``peer``, waits for the answer, and returns the result. Blocks."""
    called, event = subject or function, None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.SYNC, worker.agent.info.name, peer, called)
    call, span = _new_call(worker, peer, called, timeout)
    request = worker.encoder.request(peer, function, args, kwargs, call.timeout_s, span=span)
    try:
        answer = worker.agent.calls.ask_and_wait(peer, call, request, worker.decoder.natively())
    except BaseException as error:  # It could not be sent, or a signal handler has raised.
        if call.number and call.error is None:
            worker.agent.calls.cancel(call, CallCancelled("interrupted", worker=peer.name))
            frame, call.frame = call.frame, None
            if frame is not None:
                worker.discard_reply(peer, frame)
        # The callee may have a message that has a number.
        _take_back(call, request, error, keeps_graph=call.number != 0)
        raise
    finally:
        if event is not None:
            event.__exit__(None, None, None)
    if answer is not None:
        return answer[0]
    try:
        return worker.result_of(call)
    except BaseException:
        if call.frame is not None:  # Ctrl-C, before the answer was looked at.
            worker.discard_reply(peer, call.frame)
        raise


def start(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | str | None = None,
) -> Future[Any]:
    """Starts a call on ``peer``, even if another worker has its name by now; returns a future.

    Messages name ``subject`` if it is given, otherwise the function.
    """
    called, event = subject or function, None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.ASYNC, worker.agent.info.name, peer, called)
    call, span = _new_call(worker, peer, called, timeout)
    request = worker.encoder.request(peer, function, args, kwargs, call.timeout_s, span=span)
    try:
        # References among them must outlive the call, also if the program changes ``args``.
        call.kept = (*args, *kwargs.values()) if kwargs else tuple(args)
        future: Future[Any] = Future(worker, call)
        if event is not None:
            _end_with_call(event, call)
        worker.agent.calls.ask(peer, call, request)
    except BaseException as error:
        _take_back(call, request, error)
        raise
    return future


def create(
    worker: Worker,
    peer: Peer,
    function: Any,
    args: Sequence[Any],
    kwargs: Any,
    timeout: float,
    subject: Subject | None = None,
) -> Handle:
    """Starts a call whose result stays on ``peer``; returns the reference to it.

    The value is wanted as long as a reference to it exists, so ``timeout`` is only checked.
    """
    event = None
    if profiler._is_profiler_enabled:
        event = begin_event(RPCExecMode.REMOTE, worker.agent.info.name, peer, subject or function)
    references = worker.references
    if timeout != UNSET_RPC_TIMEOUT:
        limit_of(timeout, math.inf)
    parent = current_call.get()
    if parent is not None:
        nest(parent, peer.name, subject or function, math.inf, monotonic())  # May raise.
    if peer.is_self:
        reference, _ = references.create_here()
    else:
        reference = references.creating(peer)
    try:
        maker = subject[-1] if subject else getattr(function, "__qualname__", "")
        handle = worker.reference_type.from_created(references, reference, maker)
        call = PendingCall(peer.id, peer.name, subject or function, math.inf, None, parent)
        span = worker.note_call(call) if worker.watchers else b""
        number = reference.number
        request = worker.encoder.request(peer, function, args, kwargs, math.inf, number, span)
        try:
            worker.agent.sender.send(peer, request.message(0))
        except BaseException as error:
            _take_back(call, request, error)
            raise
    except BaseException:
        if not peer.is_self:
            references.not_created(reference)
        raise
    for each in call.watchers:
        each.creation_sent(call, reference)
    if event is not None:
        handle.end_event(event)
    return handle


def _take_back(
    call: PendingCall, request: Request, error: BaseException, *, keeps_graph: bool = False
) -> None:
    """Takes back all that a call which was not sent has handed on.

    Args:
        call: The call.
        request: Its request.
        error: Why it was not sent, or is not awaited.
        keeps_graph: Whether the graph is kept, as the callee may have the message.
    """
    request.take_back(keeps_graph=keeps_graph)
    for each in call.watchers:
        each.call_fails(call, error)


_WAYS: dict[str, Callable[..., Any]] = {
    "sync": call_and_wait,
    "async": start,
    "remote": create,
}


# Events of profilers

TO_HERE = "to_here"
"""The use of a reference that PyTorch names without a way of the call."""


class RPCExecMode(enum.Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def build_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name of a call's event."""
    if func_name == TO_HERE:
        return f"{TO_HERE}#({current_worker_name})->({dst_worker_name})"
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def begin_event(mode: RPCExecMode, here: str, peer: Peer, function: Any) -> record_function | None:
    """Begins the event of a call that worker ``here`` makes.

    Args:
        mode: The way of the call.
        here: Name of this worker.
        peer: The callee.
        function: The function, its name, or the subject of the call. A function with the
            attribute ``has_no_event`` is a step of another call, and gets no event.
    """
    if isinstance(function, tuple):
        function = function[-1]
    elif getattr(function, "has_no_event", False):
        return None
    event = record_function(build_key(mode, _event_name(function), here, peer.name))
    event.__enter__()  # type: ignore[no-untyped-call]
    return event


def _end_with_call(event: record_function, call: PendingCall) -> None:
    """Ends an event when a call ends, before its future is seen to be done."""
    complete = call.on_done
    assert complete is not None  # set by its future
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)

    def end_and_complete(call: PendingCall) -> None:
        if not ended.done():
            ended.set_result(None)
        complete(call)

    call.on_done = end_and_complete


def _event_name(function: Any) -> str:
    """Returns the name under which a profiler shows a function."""
    if isinstance(function, bytes):
        function = text_of(function).partition(":")[2]
    if isinstance(function, str):
        return function
    builtin = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return str(builtin)
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", repr(function)))


# Futures of remote calls: real ``torch.futures.Future`` objects that can be awaited as well.
#
# The GPU work of a future's readers waits for the work that still computes its result. PyTorch's
# future does so itself, if it was made with the GPUs of its result. It records events when it is
# completed, and each reader's streams wait for them. That also serves readers that know nothing of
# Weft: ``torch.futures.wait_all``, and callbacks of C++. Three facts prevent a plain use of it.
#
# * A future is made before its result is known, and refuses a result on any other GPU. It cannot
#   name all GPUs of the machine: a callback makes streams, and so a context, on each of them.
# * PyTorch pickles a result to find its tensors, and drops a result that it cannot pickle.
# * Most processes have not initialized CUDA when they make their first futures.
#
# So a future names the GPUs that have a context when it is made. A result that PyTorch could not
# take is hidden from it, and ``OrderedFuture`` orders the work by a mark. Then only PyTorch's own
# functions for several futures, which make new objects for the same futures, show the hidden
# object.

T = TypeVar("T")
S = TypeVar("S")


class OrderedFuture(torch.futures.Future[T]):
    """A future that a component completes, by any thread: ``set_result`` or ``set_exception``.

    The GPU work of its readers waits for the work of the thread that completes it. An
    ``async_execution`` function may return it. Subclasses call ``begin`` in place of the
    constructor of PyTorch's future.
    """

    __slots__ = ()

    # No slots: only processes that use GPUs set them.
    _devices: Sequence[int] = ()
    """The GPUs on which PyTorch's future orders the work."""
    _mark: Mark | None = None
    """Where PyTorch's future does not: the end of the work that computes the result."""

    def __init__(self) -> None:
        begin(self)

    def set_result(self, result: T) -> None:
        """Completes the future with a result, which the current streams may still compute."""
        if device_streams.HAS_CUDA:
            result = self._shown(result)
        torch._C.Future.set_result(self, result)

    def _shown(self, result: Any) -> Any:
        """Returns the object to complete PyTorch's future with."""
        if self._devices and is_shown(result, self._devices):
            return result
        self._mark = device_streams.mark()
        return Hidden(result) if self._devices else result

    def set_exception(self, error: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an error; each waiter raises a copy of the error."""
        fail(self, error)

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the future is done; returns its result, or raises its error.

        Args:
            timeout: Seconds to wait at most; by default without a limit, 0 to look only.

        Raises:
            CallTimeout: It is not done by then; a later wait may get the result.
        """
        if timeout is not None and not self.done():
            self._wait_within(timeout)
        value = cast("T", torch._C.Future.wait(self))
        return self._ordered(value) if device_streams.HAS_CUDA else value

    def result(self, timeout: float | None = None) -> T:
        """Does as ``wait``; the name that the futures of Python have for it."""
        return self.wait(timeout)

    def _wait_within(self, limit_s: float) -> None:
        """Blocks until the future is done, or raises CallTimeout."""
        done: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Bypasses Weft's class: being told of the end does not count as looking at the error.
        torch._C.Future.add_done_callback(self, done.put)
        limit_s = min(limit_s, remaining_time())
        if next_done(done, monotonic() + limit_s, lambda: open_calls([self])) is None:
            raise self._late(limit_s)

    def _late(self, limit_s: float) -> CallTimeout:
        return CallTimeout(f"the future is not done within {limit_s:.1f} s", elapsed_s=limit_s)

    def value(self) -> T:
        """Returns the result of a future that is done, or raises its error."""
        if self._devices and self.done():
            return OrderedFuture.wait(self)  # PyTorch's ``value`` orders nothing.
        value = cast("T", torch._C.Future.value(self))
        return self._ordered(value) if device_streams.HAS_CUDA else value

    def _ordered(self, value: Any) -> Any:
        value = content_of(value)
        device_streams.use(self._mark, value)
        return value

    def then(self, callback: Callable[[Self], S]) -> torch.futures.Future[S]:
        """Calls ``callback`` with this future when it is done; returns a future of its result.

        The callback has the context variables and the grad mode of the code that adds it. So its
        calls belong to the autograd context that is open there.
        """
        self._watch()
        return chained(self, as_here(callback))

    # For ``asyncio.wait``, which asks these of the futures that it is given

    def add_done_callback(self, callback: Callable[[Self], None]) -> None:
        """Calls ``callback`` with this future when it is done, as ``then`` does.

        It runs on a thread of the worker. A callback of asyncio itself runs on its event loop, as
        only that thread may use it.
        """
        self._watch()
        loop = asyncio._get_running_loop()
        if loop is not None and str(getattr(callback, "__module__", "")).startswith("asyncio."):
            of_asyncio = OnLoop(loop, callback)
            self.__dict__.setdefault("_on_loops", []).append(of_asyncio)
            torch._C.Future.add_done_callback(self, of_asyncio)
        else:
            torch._C.Future.add_done_callback(self, as_here(callback))

    def _watch(self) -> None:
        """Notes that an error needs no report, as it will be looked at."""

    def remove_done_callback(self, callback: Callable[[Any], None]) -> int:
        """Takes back a callback of asyncio; returns how many there were. Others remain."""
        callbacks: list[OnLoop] = self.__dict__.get("_on_loops", [])
        removed = [each for each in callbacks if each.callback == callback]
        for each in removed:
            each.callback = None
            callbacks.remove(each)
        return len(removed)

    def exception(self) -> BaseException | None:
        """Returns the error of a future that is done; None if it has a result.

        Raises:
            asyncio.InvalidStateError: It is not done.
        """
        if not self.done():
            raise asyncio.InvalidStateError("the future is not done")
        try:
            self.value()
        except BaseException as error:
            return error
        return None

    def cancelled(self) -> bool:
        """Returns whether it ended because it was cancelled."""
        return self.done() and isinstance(self.exception(), CallCancelled)


def as_here(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """Returns a callback that has this code's context variables and grad mode, on any thread.

    Raises:
        ArgumentTypeError: It is no function.
    """
    if not callable(callback):
        raise ArgumentTypeError(
            f"incompatible function arguments: the callback of a future is {kind_of(callback)}; "
            "pass a function that takes the future"
        )
    variables, is_grad_enabled = copy_context(), torch.is_grad_enabled()

    def run(done: Any) -> S:
        with torch.set_grad_enabled(is_grad_enabled):
            return variables.run(callback, done)

    return run


class OnLoop:
    """A callback that runs on the event loop on whose thread it was added."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None] | None
    ) -> None:
        self._loop = loop
        self.callback = callback

    def __call__(self, done: object) -> None:
        """Has the callback run soon, on its loop."""
        try:
            self._loop.call_soon_threadsafe(self._run, done)
        except RuntimeError:  # The loop has been closed: nobody waits there any more.
            if not self._loop.is_closed():
                raise

    def _run(self, done: object) -> None:
        if self.callback is not None:
            self.callback(done)


def wait_unseen(future: torch.futures.Future[T]) -> T:
    """Returns what ``wait`` of any future returns, but does not count as a look at an error."""
    if isinstance(future, OrderedFuture):
        return cast("T", OrderedFuture.wait(future))
    return cast("T", torch._C.Future.wait(future))


def begin(future: OrderedFuture[Any]) -> None:
    """Makes the part of a future that is PyTorch's."""
    if device_streams.HAS_CUDA:
        numbers = device_streams.devices()
        if numbers:
            future._devices = numbers
            torch._C.Future.__init__(future, native_devices(numbers))
            return
    torch._C.Future.__init__(future, [])


def native_devices(numbers: Sequence[int]) -> list[torch.device]:
    """Returns GPUs as PyTorch names them."""
    return [torch.device("cuda", number) for number in numbers]


def chained(future: OrderedFuture[Any], callback: Callable[[Any], S]) -> torch.futures.Future[S]:
    """Does what PyTorch's ``then`` does, with a child that is ordered and has our ``then``."""
    child: OrderedFuture[S] = OrderedFuture()

    def run(_: object) -> None:
        try:
            result = callback(future)
        except BaseException as error:
            # The type and text of PyTorch's own futures.
            text = f"Got the following error when running the callback: {type(error).__name__}: "
            failure = RuntimeError(text + str(error))
            failure.__cause__ = error
            fail(child, failure)
            return
        if device_streams.HAS_CUDA and not child._devices:
            # CUDA was initialized meanwhile, if at all. Readers of the child that know nothing of
            # marks need a result that is complete.
            device_streams.finish()
        child.set_result(result)

    torch._C.Future.add_done_callback(future, run)
    return child


# What PyTorch's futures are completed with


class Hidden:
    """A result that PyTorch is not to look into."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ()  # PyTorch pickles it to find tensors.

    def __repr__(self) -> str:
        return (
            f"<a result of type {type(self.content).__name__}; read it from the future that the "
            "call returned: collect_all and wait_all of torch.futures cannot>"
        )


def content_of(value: Any) -> Any:
    """Returns the result that a future was completed with."""
    return value.content if type(value) is Hidden else value


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_CONTAINERS = frozenset({tuple, list, set, frozenset})


def is_shown(value: Any, devices: Sequence[int]) -> bool:
    """Whether PyTorch finds all tensors of a value by itself, and they are on the given GPUs."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return True
        # PyTorch asks sparse tensors for their indices, which only coalesced ones tell.
        is_plain = value.layout is torch.strided or (value.is_sparse and value.is_coalesced())
        return is_plain and value.device.index in devices
    if kind in _CONTAINERS:
        return all(is_shown(each, devices) for each in value)
    if kind is dict:
        return all(is_shown(each, devices) for both in value.items() for each in both)
    if isinstance(value, Handle):
        return True  # It tells PyTorch that it has no tensors.
    try:
        extract: Any = torch._jit_internal._extract_tensors
        found = extract(value)
    except Exception as error:
        if is_of_handler(error):
            raise
        return False  # It cannot be pickled, or this version of PyTorch does it in another way.
    return all(is_shown(each, devices) for each in found)


def fail(
    future: torch.futures.Future[Any], error: BaseException, guard: Guard | None = None
) -> None:
    """Completes any future with an error; each waiter raises a copy of the error.

    Args:
        future: The future.
        error: The error.
        guard: Is told when the value of the future is read.
    """
    drop_frames(error)
    future._set_unwrap_func(partial(_raise_copy, guard))
    future.set_result(error)


def _raise_copy(guard: Guard | None, held: Any) -> None:
    """Raises a copy of the error that a future holds, when the value of the future is read."""
    if guard is not None:
        guard.was_seen = True
    try:
        raise fresh_copy(content_of(held))
    except BaseException as copy:
        BaseException.with_traceback(copy, None)  # The traceback begins at the read.
        raise


class Future(OrderedFuture[T]):
    """The result of a remote call, which may still be running.

    Works with ``then``, ``add_done_callback``, ``torch.futures.collect_all`` and ``wait_all``;
    callbacks run on a thread of the worker. Works with ``await`` and ``asyncio.wait``. Thread-safe.
    """

    # Thousands may wait at a time: a dictionary in each would make garbage collection long.
    __slots__ = ("_call", "_guard", "_variables", "_worker", "is_watched", "kept")

    def __init__(self, worker: Worker, call: PendingCall) -> None:
        if device_streams.HAS_CUDA:
            begin(self)
        else:
            torch._C.Future.__init__(self, [])
        self._worker = worker
        self._call = call
        self.kept: object = None
        """An object that must live until the call has ended."""
        self.is_watched = False
        """Whether an error needs no report even if the value is never read."""
        self._guard: Guard | None = None
        self._variables: Context | None = copy_context()
        """The context variables of the code that made the call; callbacks have them as well."""
        call.on_done = self._complete

    @property
    def worker_name(self) -> str:
        """Name of the worker that was called."""
        return self._call.worker_name

    def _complete(self, call: PendingCall) -> None:
        """Completes the future; after an interrupt another thread calls this again."""
        if call.on_done is None:
            if not self.done():
                self._fail(calls.interrupted(call))
            return
        call.on_done = None  # Breaks a cycle: the garbage collector does not traverse futures.
        call.kept = None
        call.parent = None
        # Callbacks belong to the autograd context and the served call of the code that made this
        # call, also those of PyTorch's own futures, as of ``collect_all``.
        variables, self._variables = self._variables, None
        assert variables is not None
        try:
            result = variables.run(self._worker.result_of, call)
        except BaseException as error:
            if is_of_handler(error):  # It is of the thread that reads the answer, not of the call.
                variables.run(self._fail, calls.interrupted(call))
                raise
            variables.run(self._fail, error)
        else:
            variables.run(self.set_result, result)

    def _fail(self, error: BaseException) -> None:
        guard = None if self.is_watched else self._worker.unseen.guard(error, self._call)
        self._guard = guard
        if guard is not None and self.is_watched:  # just now, before there was a guard
            guard.was_seen = True
        fail(self, error, guard)

    def _watch(self) -> None:
        self.is_watched = True
        guard = self._guard
        if guard is not None:
            guard.was_seen = True

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the call has ended, at most the time limit of the call; returns its result.

        The waiting thread reads the answer itself where it can, which saves a thread switch.

        Args:
            timeout: Seconds that this wait may take; by default those of the call. 0 to look only.
                In a function that another worker has called, at most as long as its caller waits.

        Raises:
            CallTimeout: There was no answer in time. The call goes on if only ``timeout`` has
                passed, and a later wait may get the result; the future is ``done`` otherwise.
            WorkerLost: The callee was lost.
            Exception: The error of the remote function.
        """
        try:
            if not self.done():
                if timeout is None:
                    self._worker.agent.calls.wait(self._call, may_complete=not self.is_watched)
                else:
                    self._wait_within(timeout)
            value = cast("T", torch._C.Future.wait(self))
            return self._ordered(value) if device_streams.HAS_CUDA else value
        except Exception as error:
            shorten(error)
            raise

    def _late(self, limit_s: float) -> CallTimeout:
        call = self._call
        name = calls.function_name(call.function)
        return CallTimeout(
            f"{name} on worker {call.worker_name!r} has not ended within {limit_s:.1f} s; the call "
            "goes on, and may be waited for again",
            worker=call.worker_name,
            call=name,
            elapsed_s=limit_s,
        )

    def value(self) -> T:
        """Returns the result of a call that has ended.

        Raises:
            Exception: As ``wait``.
        """
        try:
            if device_streams.HAS_CUDA:
                return OrderedFuture.value(self)
            return cast("T", torch._C.Future.value(self))
        except Exception as error:
            shorten(error)
            raise

    def cancel(self) -> bool:
        """Cancels the call: the future fails with ``CallCancelled``, and the callee is told.

        A function that has not started will not start. ``asyncio.CancelledError`` is raised in an
        ``async def``. Any other function runs on and may query
        ``torchweft.rpc.is_cancelled``; its calls end or are refused, and its result is discarded.

        Returns:
            Whether the call was still open.
        """
        call = self._call
        self._watch()
        error = CallCancelled("the call was cancelled by its caller", worker=call.worker_name)
        return self._worker.agent.calls.cancel(call, error)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: object) -> None:
            if not waiter.done():
                waiter.set_result(None)

        self._watch()
        torch._C.Future.add_done_callback(self, OnLoop(loop, wake))
        waiter.add_done_callback(lambda ended: ended.cancelled() and self.cancel())
        yield from waiter.__await__()
        return self.value()


def open_calls(futures: Iterable[object]) -> list[PendingCall]:
    """Returns the open calls of those futures that stand for calls; see ``Reactor.waiting``."""
    found = [each for each in futures if isinstance(each, Future) and not each.done()]
    return [each._call for each in found]


def ignore_errors(future: Future[Any]) -> None:
    """Suppresses the report of a call's error that nobody looks at: it need not succeed."""
    future._watch()


# Waiting for one of several


def next_done(
    done: queue.SimpleQueue[T], deadline_s: float, calls: Callable[[], Sequence[PendingCall]]
) -> T | None:
    """Returns the next of what is done, or None at the deadline. Blocks, and is counted as such.

    Args:
        done: Gets what is done.
        deadline_s: By the clock of ``time.monotonic``.
        calls: Returns the open calls of which any lets this thread go on; for reports.
    """
    with contextlib.suppress(queue.Empty):
        return done.get_nowait()
    waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if of_process.is_set():
        waiting = of_process.current().reactor.waiting(calls, needs_any=True)
    left_s = deadline_s - monotonic()
    with waiting, contextlib.suppress(queue.Empty):
        return done.get(timeout=None if math.isinf(left_s) else max(left_s, 0.0))
    return None
