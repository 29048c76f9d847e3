"""Records what one worker does while it is traced, and what ``torch.profiler`` records meanwhile.

Calls, backward passes, links and tensor messages tell whoever has subscribed. A profile tells the
time since 1970; the difference to the clock of traces is measured when the profile ends.

The leader of a trace calls the functions at the end of this file on the other workers. They tell
names of functions, numbers, sizes and times, which any member may see by observing; they read and
return no value of the program. So a strict worker runs them as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchweft.errors import ConfigurationError, ObserveError, WorkerLost
from torchweft.extending import (
    PerWorker,
    caller,
    check_types,
    log_exception,
    on_leave,
    remotely_callable,
    served_call,
    this_worker,
    watch,
    worker_of,
)
from torchweft.observe.tracing.notes import Rows, TracingWatcher
from torchweft.observe.tracing.reading import STEP
from torchweft.observe.tracing.slices import Slice, Slicer, set_apart
from torchweft.probe import clock_id
from torchweft.rpc import on_worker_lost

PROFILED = "torch.profiler"
"""Category of what it has recorded."""
_READINGS = 5
_NS = 1e-9
_UNKNOWN = 1 << 30
"""Threads whose id at the system is unknown, and devices, are numbered from here on: beyond all ids
of Linux, and within the 32 bits that importers have."""


class Profile:
    """What ``torch.profiler`` records of all threads of this process, from now on."""

    def __init__(self) -> None:
        settings: dict[str, Any] = {"use_kineto": True}
        if torch.cuda.is_available():
            settings["use_device"] = "cuda"
        with contextlib.suppress(TypeError):  # Older versions of torch see the calling thread only.
            every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            settings["experimental_config"] = every
        make: Any = profile
        self._profile = make(**settings)
        self._profile.__enter__()

    def end(self) -> None:
        """Ends it."""
        try:
            self._profile.__exit__(None, None, None)
        except Exception:  # The program may have ended it, by a profile of its own.
            log_exception("the profile of a trace could not be read")
            self._profile = None

    def slices(self, tracks: Tracks) -> list[Slice]:
        """Returns its events as slices."""
        if self._profile is None:
            return []
        since_s, found = _since_1970_s(), []
        for event in self._profile.kineto_results.events():
            began_s = event.start_ns() * _NS - since_s
            device, lane = event.device_type(), event.device_resource_id()
            if device == DeviceType.CPU:
                track = tracks.of_profiled(lane)
            else:
                track = tracks.of_device(f"{device.name.lower()}:{event.device_index()}", lane)
            ended_s = began_s + event.duration_ns() * _NS
            found.append(Slice(track, began_s, ended_s, PROFILED, event.name(), {}))
        return found


def _since_1970_s() -> float:
    """Returns the difference between the time since 1970 and the clock of traces."""
    found = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        found.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(found)[1]


class Tracks:
    """The tracks of one worker: numbers and names, also of threads that have ended.

    What ``torch.profiler`` has recorded of a thread is on a track of its own, below that of the
    thread: its times were converted from another clock, and need not nest with those of Weft.

    Attributes:
        names: The names of the tracks in use, by number.
    """

    def __init__(self) -> None:
        self._threads = {each.ident: each for each in threading.enumerate()}
        self._lanes = {each.native_id: each.name for each in threading.enumerate()}
        self._unknown = itertools.count(_UNKNOWN)
        self._numbers: dict[Any, int] = {}
        self.names: dict[int, str] = {}

    def of_thread(self, ident: int) -> int:
        """Returns the track of a thread of Python: the system's id of it, where that is known."""
        thread = self._threads.get(ident)
        name = "a thread that has ended" if thread is None else thread.name
        return self._track(ident, name, None if thread is None else thread.native_id)

    def of_profiled(self, lane: int) -> int:
        """Returns the track for what is profiled of a thread, by the system's id of it."""
        name = self._lanes.get(lane, f"thread {lane}")
        return self._track(("", lane), f"{name}: {PROFILED}")

    def of_device(self, device: str, lane: int) -> int:
        """Returns the track of a stream of a device."""
        return self._track((device, lane), f"{device} stream {lane}")

    def _track(self, key: Any, name: str, native_id: int | None = None) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = native_id or next(self._unknown)
            self.names[number] = name
        return number


class Recording:
    """What one worker notes for one trace, from now on.

    Args:
        trace: The number of the trace, which its leader has chosen.
        leader: The life of the worker that leads it.
        limit: How many rows are kept; the oldest are dropped for new ones.
        profiles: Whether ``torch.profiler`` runs meanwhile.

    Attributes:
        id: The first two arguments.
        about: What is said of the recording, once it has been read.
        slices: What it has, once it has been read.
    """

    def __init__(self, trace: int, leader: int, limit: int, *, profiles: bool) -> None:
        self.id = (trace, leader)
        self.about: dict[str, Any] = {}
        self.slices: deque[Slice] = deque()
        self._rows = Rows(limit)
        self._own_calls: list[tuple[int, int]] = []
        self._profile = Profile() if profiles else None
        watcher = TracingWatcher(self._rows)
        self._ends = [*_note_steps(watcher), watch(watcher)]

    def leave_out(self, call: Any) -> None:
        """Leaves a served call, or None, out of the recording: it is one of the trace itself."""
        if call is not None:
            self._own_calls.append((call.peer.id, call.number))

    def stop(self) -> None:
        """Notes nothing any more; may be called several times."""
        ends, self._ends = self._ends, []
        for end in ends:
            end()
        if ends and self._profile is not None:
            self._profile.end()

    def read(self) -> None:
        """Makes the slices; nothing if they were made before."""
        if self.about:
            return
        me, tracks = this_worker(), Tracks()
        rows, ends, dropped = self._rows.end()
        for each in Slicer(rows, ends, me.id, _name_of, self._own_calls).slices():
            self.slices.append(each._replace(track=tracks.of_thread(each.track)))
        if self._profile is not None:
            self.slices.extend(set_apart(self._profile.slices(tracks)))
        self.about = {
            "name": me.name,
            "rank": me.info.id,
            "pid": os.getpid(),
            "host": me.host,
            "tracks": tracks.names,
            "records": len(rows),
            "dropped": dropped,
        }


def _name_of(life: int) -> str:
    try:
        return worker_of(life).name
    except KeyError:
        return f"worker {life}"


class Recorder:
    """Records what one worker does while it is traced. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._recording: Recording | None = None
        self._forget_loss: Callable[[], None] = lambda: None
        on_leave(self._give_up)

    @property
    def is_on(self) -> bool:
        """Whether this worker records, or has records that nobody has taken yet."""
        return self._recording is not None

    def begin(
        self, trace: int, leader: int, limit: int, *, profiles: bool, call: object = None
    ) -> None:
        """Begins to note; gives up if the leader is lost.

        Args:
            trace: The number of the trace.
            leader: The life of the worker that leads it.
            limit: How many rows are kept.
            profiles: Whether ``torch.profiler`` runs meanwhile.
            call: The call by which the leader asks, if it has asked by one.

        Raises:
            ObserveError: The worker is traced already.
        """
        with self._lock:
            if self._recording is not None:
                name = _name_of(self._recording.id[1])
                raise ObserveError(
                    f"worker {this_worker().name!r} is traced already, by worker {name!r}; "
                    "let that trace end first"
                )
            self._recording = Recording(trace, leader, limit, profiles=profiles)
            self._recording.leave_out(call)
            # Race: the leader may be lost by now. Its loss is told by a thread that takes the lock.
            self._forget_loss = on_worker_lost(self._worker_lost)

    def _worker_lost(self, _: WorkerLost) -> None:
        with self._lock:
            recording = self._recording
            if recording is not None and worker_of(recording.id[1]).lost is not None:
                self._give_up()

    def end(self, trace: int, leader: int, call: object = None) -> None:
        """Stops noting; takes ``begin``'s arguments.

        Raises:
            ObserveError: The worker does not record that trace.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            recording.leave_out(call)
            recording.stop()

    def take(self, trace: int, leader: int) -> tuple[dict[str, Any], list[Any]]:
        """Takes slices out of a recording, ``BATCH`` at most. With none left, it is over.

        Returns:
            Plain values about the recording, and the fields of the slices.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            recording.stop()
            recording.read()
            slices = recording.slices
            if not slices:
                self._give_up()
            taken = [tuple(slices.popleft()) for _ in range(min(BATCH, len(slices)))]
            return recording.about, taken

    def forget(self, trace: int, leader: int) -> None:
        """Ends a trace without its slices; nothing if the worker records none of that leader."""
        with self._lock:
            if self._recording is not None and self._recording.id == (trace, leader):
                self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            recording, self._recording = self._recording, None
            if recording is not None:
                recording.stop()
                self._forget_loss()

    def _checked(self, trace: int, leader: int) -> Recording:
        recording = self._recording
        if recording is None or recording.id != (trace, leader):
            raise ObserveError(
                f"worker {this_worker().name!r} does not record this trace: it joined after the "
                "begin, the trace was given up, or another worker leads it"
            )
        return recording


RECORDER = PerWorker(Recorder)


def _note_steps(watcher: TracingWatcher) -> list[Callable[[], None]]:
    """Notes the steps of all optimizers of the process; returns what ends that."""
    began: dict[int, float] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        began[get_ident()] = time.monotonic()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        now_s = time.monotonic()
        began_s, name = began.pop(get_ident(), now_s), type(optimizer).__name__
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        watcher.ran(began_s, now_s, STEP, name, 0, (("parameters", count),))

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    return [hook.remove for hook in hooks]


MOST_ROWS = 5_000_000
"""Records that a worker keeps at most, about 350 bytes each."""
BATCH = 20_000
"""Slices in one answer."""
_CLOCK_ID = clock_id()  # Read at once: calls of other workers open no file.


@remotely_callable
def read_clock() -> tuple[str, float]:
    """Returns the id of this worker's clock, and its time."""
    return _CLOCK_ID, time.monotonic()


@remotely_callable
def begin(trace: int, limit: int, profiles: bool) -> None:
    """Has this worker record what it does."""
    check_types(trace=(trace, int), limit=(limit, int), profiles=(profiles, bool))
    if not 0 < limit <= MOST_ROWS:
        raise ConfigurationError(f"limit is {limit}; a worker keeps 1 to {MOST_ROWS} records")
    call = served_call()
    RECORDER.get().begin(trace, caller().id, limit, profiles=profiles, call=call)


@remotely_callable
def end(trace: int) -> None:
    """Has this worker stop recording."""
    check_types(trace=(trace, int))
    RECORDER.get().end(trace, caller().id, served_call())


@remotely_callable
def take(trace: int) -> tuple[dict[str, Any], list[Any]]:
    """Returns what is said of a recording, and its next slices; none if it has no more."""
    check_types(trace=(trace, int))
    return RECORDER.get().take(trace, caller().id)


@remotely_callable
def forget(trace: int) -> None:
    """Has this worker stop recording, and drop the recording."""
    check_types(trace=(trace, int))
    RECORDER.get().forget(trace, caller().id)
