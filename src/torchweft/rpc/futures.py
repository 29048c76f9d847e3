"""Futures of remote calls: real ``torch.futures.Future`` objects that can be awaited as well.

The GPU work of a future's readers waits for the work that still computes its result. PyTorch's
future does so itself, if it was made with the GPUs of its result. It records events when it is
completed, and each reader's streams wait for them. That also serves readers that know nothing of
Weft: ``torch.futures.wait_all``, and callbacks of C++. Three facts prevent a plain use of it.

* A future is made before its result is known, and refuses a result on any other GPU. It cannot name
  all GPUs of the machine: a callback makes streams, and so a context, on each of them.
* PyTorch pickles a result to find its tensors, and drops a result that it cannot pickle.
* Most processes have not initialized CUDA when they make their first futures.

So a future names the GPUs that have a context when it is made. A result that PyTorch could not take
is hidden from it, and ``OrderedFuture`` orders the work by a mark. Then only PyTorch's own
functions for several futures, which make new objects for the same futures, show the hidden object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from torchweft.arguments import kind_of
from torchweft.engine.codec.exceptions import fresh_copy
from torchweft.engine.codec.tracebacks import drop_frames, shorten
from torchweft.engine.protocol import calls
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.references import Handle
from torchweft.errors import ArgumentTypeError, CallCancelled
from torchweft.rpc.unseen import Guard
from torchweft.rpc.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
S = TypeVar("S")


class OrderedFuture(torch.futures.Future[T]):
    """A future that orders the work of its readers after the work of its maker.

    Subclasses call ``begin`` in place of the constructor of PyTorch's future.
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

    def wait(self) -> T:
        """Blocks until the future is done; returns its result, or raises its error."""
        value = cast("T", torch._C.Future.wait(self))
        return self._ordered(value) if device_streams.HAS_CUDA else value

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
            of_asyncio = _OnLoop(loop, callback)
            self.__dict__.setdefault("_on_loops", []).append(of_asyncio)
            torch._C.Future.add_done_callback(self, of_asyncio)
        else:
            torch._C.Future.add_done_callback(self, as_here(callback))

    def _watch(self) -> None:
        """Notes that an error needs no report, as it will be looked at."""

    def remove_done_callback(self, callback: Callable[[Any], None]) -> int:
        """Takes back a callback of asyncio; returns how many there were. Others remain."""
        callbacks: list[_OnLoop] = self.__dict__.get("_on_loops", [])
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


class _OnLoop:
    """A callback that runs on the event loop on whose thread it was added."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None] | None
    ) -> None:
        self._loop = loop
        self.callback = callback

    def __call__(self, done: object) -> None:
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
    except Exception:  # It cannot be pickled, or this version of PyTorch does it in another way.
        return False
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

    def wait(self) -> T:
        """Blocks until the call has ended, at most its timeout; returns its result.

        The waiting thread reads the answer itself where it can, which saves a thread switch.

        Raises:
            CallTimeout: There was no answer in time.
            WorkerLost: The callee was lost.
            Exception: The error of the remote function.
        """
        try:
            if not self.done():
                self._worker.agent.calls.wait(self._call, may_complete=not self.is_watched)
            value = cast("T", torch._C.Future.wait(self))
            return self._ordered(value) if device_streams.HAS_CUDA else value
        except Exception as error:
            shorten(error)
            raise

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
        torch._C.Future.add_done_callback(self, _OnLoop(loop, wake))
        waiter.add_done_callback(lambda ended: ended.cancelled() and self.cancel())
        yield from waiter.__await__()
        return self.value()


def open_calls(futures: Iterable[object]) -> list[PendingCall]:
    """Returns the open calls of those futures that stand for calls; see ``Reactor.waiting``."""
    found = [each for each in futures if isinstance(each, Future) and not each.done()]
    return [each._call for each in found]


def ignore_errors(future: Future[Any]) -> None:
    """Suppresses the error report of a best-effort call."""
    future._watch()
