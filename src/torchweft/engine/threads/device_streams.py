"""The order of GPU work between the threads of one process.

PyTorch orders GPU work within a stream, and each thread has current streams of its own. A value
that one thread computes and another uses is used too early, unless the other's stream waits. So
the threads of a worker follow three rules; ``docs/protocols/devices.md`` states the guarantees.

* A task runs on side streams of its own (``ServedStreams``), which wait for the tasks that have
  ended before it.
* A value that goes from thread to thread carries a ``Mark``, and its user waits for it. All these
  waits are the GPU's; the threads go on.
* No side stream waits for the default stream, except for the mark of a value. The default stream
  of a trainer may wait for a collective whose other side waits for this very task.

A wait protects a value from an early use, but not from an early end: the allocator gives memory of
a dead tensor to the next operation of the stream that allocated it. So ``use`` also tells the
allocator of the stream that uses a tensor.

Rules of the file:

* Nothing here creates the context of a GPU, or initializes CUDA.
* Where CUDA is not initialized, every function returns after one look at an attribute. Code that
  runs for every small call looks at ``HAS_CUDA`` first, and calls nothing where it is False.
* Nothing here raises: a GPU that has failed must not keep the calls of a worker unanswered. The
  next operation of the program on that GPU raises.
* Events are not queried, since that would break the capture of a graph on another thread.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger("torchweft")

P = ParamSpec("P")
T = TypeVar("T")

_DEEPEST = 4
"""How deep containers are searched for tensors."""


class Cuda:
    """The operations on streams and events that this module needs; tests have their own.

    It uses PyTorch without the Python functions that may create a context.
    """

    def __init__(self) -> None:
        self._native: Any = torch._C
        self._cuda: Any = torch.cuda
        self._count = -1
        self._with_context: tuple[int, ...] = ()
        self._streams: dict[Any, Any] = {}

    def is_initialized(self) -> bool:
        """Whether CUDA can be used in this process."""
        # A forked child has the flag of its parent, but cannot use CUDA.
        return self._cuda._initialized and not self._cuda._is_in_bad_fork()

    def devices(self) -> Sequence[int]:
        """Returns the devices that have a context; earlier ones stay, in their order."""
        if len(self._with_context) != self._count:
            if self._count < 0:
                self._count = self._cuda.device_count()
            has_context = self._native._cuda_hasPrimaryContext
            known = self._with_context
            fresh = [each for each in range(self._count) if each not in known and has_context(each)]
            if fresh:
                self._with_context = (*known, *fresh)
        return self._with_context

    def current_device(self) -> int:
        """Returns the current device of this thread."""
        return int(self._native._cuda_getDevice())

    def set_device(self, device: int) -> None:
        """Sets the current device of this thread, without making a context there."""
        self._cuda._maybe_exchange_device(device)

    def current_stream(self, device: int) -> Any:
        """Returns the current stream of this thread on a device."""
        return self._stream(self._native._cuda_getCurrentStream(device))

    def default_stream(self, device: int) -> Any:
        """Returns the default stream of a device."""
        return self._stream(self._native._cuda_getDefaultStream(device))

    def _stream(self, key: tuple[int, int, int]) -> Any:
        stream = self._streams.get(key)
        if stream is None:
            number, device, kind = key
            stream = self._cuda.Stream(stream_id=number, device_index=device, device_type=kind)
            if len(self._streams) >= _MOST_STREAMS:  # Streams of other libraries may come and go.
                self._streams = {}
            self._streams[key] = stream
        return stream

    def new_stream(self, device: int) -> Any:
        """Returns a stream that is not the default stream."""
        return self._cuda.Stream(device=device)

    def set_stream(self, stream: Any) -> None:
        """Sets the current stream of this thread on the stream's device; may set the device too."""
        self._native._cuda_setStream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def record(self, stream: Any, event: Any = None) -> Any:
        """Records an event, by default a new one, behind the work of a stream; returns it."""
        if event is None:
            event = self._cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Has the further work of a stream wait for the latest record of an event."""
        event.wait(stream)

    def synchronize(self, stream: Any) -> None:
        """Blocks until the work of a stream is done."""
        stream.synchronize()

    def keep(self, tensor: Any, stream: Any) -> None:
        """Keeps the memory of a dead tensor from reuse until the work of a stream is done."""
        if tensor.layout is torch.strided:
            tensor.record_stream(stream)
        elif tensor.layout is torch.sparse_coo:
            tensor._indices().record_stream(stream)
            tensor._values().record_stream(stream)
        else:
            for part in _PARTS.get(tensor.layout, ()):
                getattr(tensor, part)().record_stream(stream)


_MOST_STREAMS = 1024
_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def _has_driver() -> bool:
    """Whether this build of PyTorch could use a GPU of this machine; does not start CUDA."""
    if torch.version.cuda is None:
        return torch.version.hip is not None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


HAS_CUDA = _has_driver()
"""Whether this process may ever use a GPU. Most packages of PyTorch can, most machines cannot."""

cuda = Cuda()

_has_reported = False


def report_failure() -> None:
    """Logs, once, that CUDA does not work any more."""
    global _has_reported
    if not _has_reported:
        _has_reported = True
        _log.exception(
            "CUDA has failed, so the GPU work of this process is not ordered any more; the next "
            "operation of the program on that GPU should raise the same error"
        )


def _safe(instead: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function return ``instead`` where CUDA is not initialized, or fails."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not HAS_CUDA or not cuda.is_initialized():
                return instead
            try:
                return function(*args, **kwargs)
            except Exception:
                report_failure()
                return instead

        return call

    return decorate


# Marks

Mark = tuple[tuple[int, Any, Any], ...]
"""A point in the work of a thread: device, stream and event for each of its current streams."""
_NO_MARK: Mark | None = None
_NO_DEVICES: Sequence[int] = ()


@_safe(_NO_MARK)
def mark(device: int | None = None) -> Mark | None:
    """Returns a mark of this thread's current streams, on one device or all that have a context.

    Returns None where CUDA is not initialized, since there is no GPU work then.
    """
    found = []
    for each in cuda.devices() if device is None else (device,):
        stream = cuda.current_stream(each)
        found.append((each, stream, cuda.record(stream)))
    return tuple(found)


@_safe(None)
def wait(at: Mark | None) -> None:
    """Has this thread's current streams wait for the work before a mark; does not block."""
    for device, stream, event in at or ():
        current = cuda.current_stream(device)
        if current != stream:
            cuda.wait(current, event)


@_safe(None)
def keep(*values: Any) -> None:
    """Notes that this thread's current streams use tensors of other streams, which may die soon.

    Args:
        values: Tensors, or tuples, lists and dictionaries with tensors in them.
    """
    current: dict[int, Any] = {}
    for tensor in _on_devices(values, _DEEPEST):
        device = _number_of(tensor)
        stream = current.get(device)
        if stream is None:
            stream = current[device] = cuda.current_stream(device)
        cuda.keep(tensor, stream)


def use(at: Mark | None, *values: Any) -> None:
    """Has this thread use values that carry a mark: ``wait`` and ``keep``."""
    if at is not None:
        wait(at)
        keep(*values)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _number_of(tensor: Tensor) -> int:
    return tensor.device.index


def _on_devices(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yields the tensors on GPUs among values, and in containers among them."""
    for value in values:
        if _is_on_device(value):
            yield value
        elif depth and isinstance(value, (tuple, list)):
            yield from _on_devices(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _on_devices(value.values(), depth - 1)


def tensors_on_devices(*values: Any) -> list[Any]:
    """Returns the tensors on GPUs among values, and in tuples, lists and dictionaries."""
    return list(_on_devices(values, _DEEPEST))


def arguments_of(body: Any) -> list[Any]:
    """Returns the arguments of a coroutine, or of a generator of any kind, that has not started."""
    kinds = ("cr_frame", "gi_frame", "ag_frame")
    frame = next((found for kind in kinds if (found := getattr(body, kind, None))), None)
    if frame is None:
        return []
    found = frame.f_locals
    values = list(found.values())
    if type(found) is dict:
        found.clear()  # Before Python 3.13 it is a copy, which would keep them for long.
    return values


@_safe(_NO_DEVICES)
def devices() -> Sequence[int]:
    """Returns the numbers of the GPUs that have a context in this process."""
    return cuda.devices()


@_safe(None)
def finish() -> None:
    """Blocks until the work of this thread's current streams is done."""
    for device in cuda.devices():
        cuda.synchronize(cuda.current_stream(device))


def allow_leaves_of_other_streams() -> None:
    """Ends PyTorch's warning of backward passes on other streams than the forward pass.

    A pass runs where its gradients arrive, and PyTorch orders the streams by itself.
    """
    switch = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if switch is not None:
        switch(False)


# Locks


class Order:
    """Orders the GPU work of ``with`` blocks under one lock, as the blocks hold the lock.

    It is not the lock itself, as in ``with lock, order:``. A lock that does more when it is taken
    or given back would be held for ever after an interrupt at that moment.
    """

    def __init__(self) -> None:
        self._mark: Mark | None = None

    def __enter__(self) -> None:
        wait(self._mark)

    def __exit__(self, *failure: object) -> None:
        self._mark = mark() or self._mark


def new_order() -> AbstractContextManager[Any]:
    """Returns an ``Order``; for a build without CUDA, an object that takes no step of Python."""
    return Order() if HAS_CUDA else threading.RLock()


class Guard(NamedTuple):
    """A lock for memory that may be a GPU's; for ``with guard.lock, guard.order:``."""

    lock: threading.Lock
    order: AbstractContextManager[Any]


def new_guard() -> Guard:
    """Returns a lock and its order."""
    return Guard(threading.Lock(), new_order())


# The streams on which the tasks of one worker run, and the order between them


MOST_LANES = 32
"""How many tasks have streams of their own; PyTorch makes 32 streams for each GPU."""


class _Lane:
    """A number that tasks take one after the other, and its stream on each device.

    Each task leaves an event at the end of its work, which stands for all work of the lane so far.
    So two counts tell which lanes another lane has to wait for, and nothing else is kept of tasks.
    """

    __slots__ = ("ended_at", "events", "number", "seen", "streams")

    def __init__(self, number: int) -> None:
        self.number = number
        self.streams: dict[int, Any] = {}
        self.events: dict[int, Any] = {}
        self.ended_at = 0
        """The count of ended tasks when the latest task of the lane had ended."""
        self.seen = 0
        """The count of ended tasks for which the streams of this lane wait, when it is free."""

    def stream(self, device: int) -> Any:
        stream = self.streams.get(device)
        if stream is None:
            # Race: tasks that share the lane may both make a stream; one of the two is used.
            stream = self.streams.setdefault(device, cuda.new_stream(device))
        return stream


class ServedStreams:
    """The streams on which the tasks of one worker run. Thread-safe.

    A task takes the free lane of the lowest number. So tasks that follow one another use the same
    streams, and concurrent ones use others.
    """

    def __init__(self, most_lanes: int = MOST_LANES) -> None:
        self._most = most_lanes
        self._lock = threading.RLock()
        self._lanes: list[_Lane] = []
        self._free: list[int] = []  # a heap
        self._in_use: dict[int, int] = {}
        self._next_shared = 0
        self._ended = 0

    # Tasks

    def begin(self) -> Attached | None:
        """Makes side streams current in this thread; they wait for the tasks that have ended.

        Returns:
            The argument for ``end``. None where CUDA is not initialized yet.
        """
        if not cuda.is_initialized():
            return None
        task = Attached(self)
        task.renew()
        return task

    def end(self, task: Attached | None) -> None:
        """Notes the end of a task's work; restores this thread's streams and its device."""
        # Without a task, CUDA may have been initialized meanwhile, perhaps by the task.
        (Attached(self) if task is None else task).close()

    def attach(self) -> Attached:
        """Returns the use of a side stream by this thread, for as long as the thread lives."""
        return Attached(self)

    def carried(self, function: Callable[[], T]) -> Callable[[], T]:
        """Returns a function for another thread, which runs it on side streams, after this one."""
        if not HAS_CUDA:
            return function
        at = mark()

        def run() -> T:
            entered = self.begin()
            wait(at)
            try:
                return function()
            finally:
                self.end(entered)

        return run

    def _take(self) -> tuple[_Lane, int]:
        """Returns a lane, and the count of ended tasks for which it waits already."""
        with self._lock:
            if self._free:
                lane = self._lanes[heapq.heappop(self._free)]
            elif len(self._lanes) < self._most:
                lane = _Lane(len(self._lanes))
                self._lanes.append(lane)
            else:
                lane = self._lanes[self._next_shared]
                self._next_shared = (self._next_shared + 1) % self._most
            users = self._in_use.get(lane.number, 0)
            self._in_use[lane.number] = users + 1
            # Another user of the lane may not have made its streams wait yet.
            return lane, 0 if users else lane.seen

    def _look(self, seen: int, lane: _Lane) -> tuple[int, list[_Lane]]:
        """Returns the count of ended tasks, and the other lanes that have ended one since."""
        with self._lock:
            return self._ended, [
                each for each in self._lanes if each.ended_at > seen and each is not lane
            ]

    def _publish(self, lane: _Lane) -> None:
        with self._lock:
            self._ended += 1
            lane.ended_at = self._ended

    def _give_back(self, lane: _Lane, seen: int) -> None:
        with self._lock:
            self._ended += 1
            lane.ended_at = self._ended
            lane.seen = max(lane.seen, seen)
            number = lane.number
            self._in_use[number] -= 1
            if not self._in_use[number]:
                heapq.heappush(self._free, number)


def _await(stream: Any, device: int, ended: Iterable[_Lane]) -> None:
    for lane in ended:
        # Race: the event may be recorded anew meanwhile, by the end of a later task. So the stream
        # may wait for more work, and never for less.
        event = lane.events.get(device)
        if event is not None:
            cuda.wait(stream, event)


def _note_end(lane: _Lane, device: int) -> None:
    """Records, on a lane's own stream, the work of this thread on a device."""
    stream = lane.stream(device)
    current = cuda.current_stream(device)
    if current != stream:  # The program has changed it, or the device has a context only now.
        cuda.wait(stream, cuda.record(current))
    lane.events[device] = cuda.record(stream, lane.events.get(device))


class Attached:
    """The use of a lane by one thread, for a task or for as long as the thread lives.

    Args:
        served: The streams of the worker.
    """

    def __init__(self, served: ServedStreams) -> None:
        self._served = served
        self._lane: _Lane | None = None
        self._seen = 0
        """The count of ended tasks for which this thread waits."""
        self._before: dict[int, Any] = {}
        """The streams that were current before, by the devices whose side stream is current."""
        self._device = 0
        """The device that was current before."""

    def renew(self) -> None:
        """Has the further work of this thread wait for the tasks that have ended.

        Makes the side stream of a device current, once, when the device has a context.
        """
        self._meet(is_published=False)

    def publish(self) -> None:
        """Has tasks that begin from now on wait for the work of this thread so far."""
        lane = self._meet(is_published=True)
        if lane is not None:
            self._served._publish(lane)

    def close(self) -> None:
        """Publishes, and ends the use: restores this thread's streams and its device."""
        self._meet(is_published=True)
        if self._lane is None:
            return
        try:
            for stream in self._before.values():
                cuda.set_stream(stream)
            cuda.set_device(self._device)
        except Exception:
            report_failure()
        self._served._give_back(self._lane, self._seen)
        self._lane = None

    def _meet(self, *, is_published: bool) -> _Lane | None:
        if not HAS_CUDA or not cuda.is_initialized():
            return None
        if self._lane is None:
            self._lane, self._seen = self._served._take()
        lane = self._lane
        self._seen, ended = self._served._look(self._seen, lane)
        try:
            for each in cuda.devices():
                stream = lane.stream(each)
                _await(stream, each, ended)
                current = cuda.current_stream(each)
                if is_published:
                    _note_end(lane, each)
                if each not in self._before:
                    # While it had no context, its stream was the default one, as in a new thread.
                    before = cuda.default_stream(each) if is_published else current
                    self._enter(each, stream, before)
                elif not is_published and ended and current != stream:
                    # Set by the program, for longer than a call.
                    cuda.wait(current, cuda.record(stream))
        except Exception:
            report_failure()
        return lane

    def _enter(self, device: int, stream: Any, before: Any) -> None:
        current = cuda.current_device()
        if not self._before:
            self._device = current
        self._before[device] = before
        cuda.set_stream(stream)
        cuda.set_device(current)
