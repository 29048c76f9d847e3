"""The streams on which the tasks of one worker run, and the order between them.

The first of the three rules in ``device_streams``, whose rules for its code hold here as well.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torchweft.threads import device_streams

T = TypeVar("T")

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
        """The count of ended tasks for which the streams of this lane wait."""

    def stream(self, device: int) -> Any:
        stream = self.streams.get(device)
        if stream is None:
            # Race: tasks that share the lane may both make a stream; one of the two is used.
            stream = self.streams.setdefault(device, device_streams.cuda.new_stream(device))
        return stream


class Entered(NamedTuple):
    """What ``ServedStreams.end`` needs to know of ``begin``."""

    lane: _Lane
    before: dict[int, Any]
    """The streams that were current before, by device."""
    device: int
    """The device that was current before."""


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

    def begin(self) -> Entered | None:
        """Makes side streams current in this thread; they wait for the tasks that have ended.

        Returns:
            The argument for ``end``. None where CUDA is not initialized yet.
        """
        cuda = device_streams.cuda
        if not cuda.is_initialized():
            return None
        lane, ended = self._take()
        before: dict[int, Any] = {}
        device = 0
        try:
            device = cuda.current_device()
            for each in cuda.devices():
                before[each] = cuda.current_stream(each)
                stream = lane.stream(each)
                _await(stream, each, ended)
                cuda.set_stream(stream)
            if before:
                cuda.set_device(device)
        except Exception:
            device_streams.report_failure()
        return Entered(lane, before, device)

    def end(self, entered: Entered | None) -> None:
        """Notes the end of a task's work; restores this thread's streams and its device."""
        cuda = device_streams.cuda
        if entered is None:
            if not cuda.is_initialized():
                return
            # CUDA was initialized meanwhile, perhaps by the task.
            lane, ended = self._take()
            before: dict[int, Any] = {}
            device = 0
        else:
            (lane, before, device), ended = entered, []
        try:
            for each in cuda.devices():
                _await(lane.stream(each), each, ended)
                _note_end(lane, each)
                # A device without a context had its default stream, as it is in every new thread.
                stream = before.get(each)
                cuda.set_stream(cuda.default_stream(each) if stream is None else stream)
            cuda.set_device(device)
        except Exception:
            device_streams.report_failure()
        self._give_back(lane)

    def carried(self, function: Callable[[], T]) -> Callable[[], T]:
        """Returns a function for another thread, which runs it on side streams, after this one."""
        if not device_streams.HAS_CUDA:
            return function
        at = device_streams.mark()

        def run() -> T:
            entered = self.begin()
            device_streams.wait(at)
            try:
                return function()
            finally:
                self.end(entered)

        return run

    # Threads that live longer than a task

    def attach(self) -> Attached:
        """Returns streams for this thread, which runs code of the program as long as it lives."""
        return Attached(self)

    def _take(self) -> tuple[_Lane, list[_Lane]]:
        """Returns a lane, and those other lanes for whose tasks it does not wait yet."""
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
            if users:
                # The task that has the lane may not have made its streams wait yet.
                return lane, self._ended_after(0, lane)
            seen, lane.seen = lane.seen, self._ended
            return lane, self._ended_after(seen, lane)

    def _ended_after(self, seen: int, lane: _Lane) -> list[_Lane]:
        return [each for each in self._lanes if each.ended_at > seen and each is not lane]

    def _look(self, seen: int, lane: _Lane) -> tuple[int, list[_Lane]]:
        with self._lock:
            return self._ended, self._ended_after(seen, lane)

    def _publish(self, lane: _Lane) -> None:
        with self._lock:
            self._ended += 1
            lane.ended_at = self._ended

    def _give_back(self, lane: _Lane) -> None:
        with self._lock:
            self._ended += 1
            lane.ended_at = self._ended
            number = lane.number
            self._in_use[number] -= 1
            if not self._in_use[number]:
                heapq.heappush(self._free, number)


def _await(stream: Any, device: int, ended: Iterable[_Lane]) -> None:
    for lane in ended:
        # Race: the event may be recorded anew meanwhile, by the end of a later task.
        event = lane.events.get(device)
        if event is not None:
            device_streams.cuda.wait(stream, event)


def _note_end(lane: _Lane, device: int) -> None:
    """Records, on a lane's own stream, the work of this thread on a device."""
    cuda = device_streams.cuda
    stream = lane.stream(device)
    current = cuda.current_stream(device)
    if current != stream:  # The program has changed it, or the device has a context only now.
        cuda.wait(stream, cuda.record(current))
    lane.events[device] = cuda.record(stream, lane.events.get(device))


class Attached:
    """The streams of a thread that serves many calls, such as the event loop. For that thread.

    Args:
        served: The streams of the worker.
    """

    def __init__(self, served: ServedStreams) -> None:
        self._served = served
        self._lane: _Lane | None = None
        self._seen = 0
        """The count of ended tasks for which this thread waits."""
        self._entered: set[int] = set()
        """The devices on which the side stream has been made current."""

    def renew(self) -> None:
        """Has the further work of this thread wait for the tasks that have ended.

        Makes the side stream of a device current, once, when the device has a context.
        """
        cuda = device_streams.cuda
        if not device_streams.HAS_CUDA or not cuda.is_initialized():
            return
        lane, ended = self._look()
        try:
            for each in cuda.devices():
                stream = lane.stream(each)
                _await(stream, each, ended)
                current = cuda.current_stream(each)
                if each not in self._entered:
                    self._enter(each, stream)
                elif ended and current != stream:  # Set by the program, for longer than a call.
                    cuda.wait(current, cuda.record(stream))
        except Exception:
            device_streams.report_failure()

    def publish(self) -> None:
        """Has tasks that begin from now on wait for the work of this thread so far."""
        cuda = device_streams.cuda
        if not device_streams.HAS_CUDA or not cuda.is_initialized():
            return
        lane, ended = self._look()
        try:
            for each in cuda.devices():
                stream = lane.stream(each)
                _await(stream, each, ended)
                _note_end(lane, each)
                if each not in self._entered:  # This thread may have made the context.
                    self._enter(each, stream)
        except Exception:
            device_streams.report_failure()
        self._served._publish(lane)

    def close(self) -> None:
        """Ends the use of the streams: the thread ends."""
        self.publish()
        if self._lane is not None:
            self._served._give_back(self._lane)
            self._lane = None

    def _look(self) -> tuple[_Lane, list[_Lane]]:
        """Returns this thread's lane, and the lanes for whose tasks it does not wait yet."""
        if self._lane is None:
            self._lane, _ = self._served._take()
        self._seen, ended = self._served._look(self._seen, self._lane)
        return self._lane, ended

    def _enter(self, device: int, stream: Any) -> None:
        cuda = device_streams.cuda
        self._entered.add(device)
        before = cuda.current_device()
        cuda.set_stream(stream)
        cuda.set_device(before)
