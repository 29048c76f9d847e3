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
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.io.link import Link
from torchweft.engine.protocol.registration import HOST
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ConfigurationError, ObserveError
from torchweft.observe.tracing.notes import LinkNotes, Names, Rows, TracingWatcher
from torchweft.observe.tracing.reading import STEP
from torchweft.observe.tracing.slices import Slice, Slicer, set_apart
from torchweft.rpc.node import current_node
from torchweft.rpc.serving import check_types
from torchweft.rpc.worker import Worker

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
    """What one worker notes for one trace.

    Args:
        trace: The number of the trace.
        leader: The id of the worker that leads it.
        limit: How many rows are kept.
        profiles: Whether ``torch.profiler`` runs meanwhile.
    """

    def __init__(self, trace: int, leader: int, limit: int, *, profiles: bool) -> None:
        self.id = (trace, leader)
        self.leader = leader
        self.rows = Rows(limit)
        self.own_calls: list[tuple[int, int]] = []
        self.links: list[Link] = []
        self.is_on = True
        self.about: dict[str, Any] = {}
        """What is said of the recording, once it has been read."""
        self.slices: deque[Slice] = deque()
        self.profile = Profile() if profiles else None


class Recorder:
    """Records what one worker does while it is traced. Thread-safe.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._agent = worker.agent
        self._lock = threading.RLock()
        self._recording: Recording | None = None
        self._watcher: TracingWatcher | None = None
        self._hooks: list[Any] = []

    @property
    def is_on(self) -> bool:
        """Whether this worker is traced now."""
        return self._recording is not None and self._recording.is_on

    def begin(self, trace: int, leader: int, limit: int, *, profiles: bool) -> None:
        """Begins to note.

        Args:
            trace: The number of the trace, which its leader has chosen.
            leader: The id of the worker that leads the trace; noting ends if it is lost.
            limit: How many rows are kept; the oldest are dropped for new ones.
            profiles: Whether ``torch.profiler`` runs meanwhile.

        Raises:
            ObserveError: The worker is traced already.
        """
        with self._lock:
            if self._recording is not None:
                name = self._agent.peers[self._recording.leader].name
                raise ObserveError(
                    f"worker {self._agent.info.name!r} is traced already, by worker {name!r}; "
                    "let that trace end first"
                )
            recording = Recording(trace, leader, limit, profiles=profiles)
            self._recording = recording
            self._note_own_call(recording)
            self._switch_on(recording)
            self._agent.on_lost(self._peer_lost)

    def _note_own_call(self, recording: Recording) -> None:
        served = current_call.get()
        if served is not None:
            recording.own_calls.append((served.peer.id, served.number))

    def _peer_lost(self, peer: Peer) -> None:
        recording = self._recording
        if recording is not None and recording.leader == peer.id:
            self.forget(*recording.id)

    def _switch_on(self, recording: Recording) -> None:
        agent, worker = self._agent, self._worker
        self._watcher = watcher = TracingWatcher(recording.rows, Names())
        worker.watch(watcher)
        worker.tensor_messages.on_fetched = watcher.fetched
        worker.tensor_messages.on_offered = watcher.offered
        worker.tensor_messages.on_pulled = watcher.pulled
        self._hooks = _note_steps(watcher)
        agent.links.on_made = self._trace_link
        for peer in list(agent.peers.values()):
            if peer.link is not None:
                self._trace_link(peer.link, peer)

    def _trace_link(self, link: Link, peer: Peer) -> None:
        recording = self._recording
        if recording is not None and link.watcher is None:
            self._agent.receiver.watched.add(link)
            link.watcher = LinkNotes(recording.rows, peer.id)
            recording.links.append(link)

    def _switch_off(self, recording: Recording) -> None:
        if not recording.is_on:
            return
        recording.is_on = False
        agent, worker = self._agent, self._worker
        agent.links.on_made = None
        for link in list(recording.links):
            link.watcher = None
            agent.receiver.watched.discard(link)
        worker.tensor_messages.on_pulled = None
        worker.tensor_messages.on_offered = None
        worker.tensor_messages.on_fetched = None
        for hook in self._hooks:
            hook.remove()
        if self._watcher is not None:
            worker.unwatch(self._watcher)
        if recording.profile is not None:
            recording.profile.end()

    def end(self, trace: int, leader: int) -> None:
        """Stops noting.

        Args:
            trace: The number of the trace.
            leader: The worker that says so.

        Raises:
            ObserveError: The worker does not record that trace.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            self._note_own_call(recording)
            self._switch_off(recording)

    def take(self, trace: int, leader: int, count: int) -> tuple[dict[str, Any], list[Any]]:
        """Takes slices out of a recording that has ended, ``count`` at most.

        When there is none left, the recording is over.

        Returns:
            Plain values about the recording, and the fields of the slices.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            self._switch_off(recording)
            recording.about = recording.about or self._read(recording)
            slices = recording.slices
            if not slices:
                self._drop()
            taken = [tuple(slices.popleft()) for _ in range(min(count, len(slices)))]
            return recording.about, taken

    def _read(self, recording: Recording) -> dict[str, Any]:
        """Makes the slices of a recording; returns what is said of it."""
        me, tracks = self._agent.me, Tracks()
        names = {peer.id: peer.name for peer in list(self._agent.peers.values())}
        rows, ends, dropped = recording.rows.end()
        for each in Slicer(rows, ends, me.id, names, recording.own_calls).slices():
            recording.slices.append(each._replace(track=tracks.of_thread(each.track)))
        if recording.profile is not None:
            recording.slices.extend(set_apart(recording.profile.slices(tracks)))
        return {
            "name": me.name,
            "rank": me.info.id,
            "pid": os.getpid(),
            "host": str(me.registration.facts.get(HOST, "")),
            "tracks": tracks.names,
            "records": len(rows),
            "dropped": dropped,
        }

    def forget(self, trace: int, leader: int) -> None:
        """Ends a trace without its slices; nothing if the worker records none of that leader."""
        with self._lock:
            recording = self._recording
            if recording is None or recording.id != (trace, leader):
                return
            self._switch_off(recording)
            self._drop()

    def _drop(self) -> None:
        self._recording = None
        self._agent.off_lost(self._peer_lost)

    def close(self) -> None:
        """Ends the trace under way, if any: the worker leaves its group."""
        recording = self._recording
        if recording is not None:
            self.forget(*recording.id)

    def _checked(self, trace: int, leader: int) -> Recording:
        recording = self._recording
        if recording is None or recording.id != (trace, leader):
            name = self._agent.info.name
            raise ObserveError(
                f"worker {name!r} does not record this trace: it joined after the begin, the trace "
                "was given up, or another worker leads it"
            )
        return recording


def _of_this_worker() -> Recorder:
    node = current_node()
    recorder = Recorder(node.worker)
    node.on_end[RECORDER] = recorder.close
    return recorder


RECORDER: Slot[Recorder] = Slot(_of_this_worker)


def _note_steps(watcher: TracingWatcher) -> list[Any]:
    """Notes the steps of all optimizers of the process; returns the handles of the hooks."""
    began: dict[int, float] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        began[get_ident()] = time.monotonic()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        now_s = time.monotonic()
        began_s, name = began.pop(get_ident(), now_s), type(optimizer).__name__
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        watcher.ran(began_s, now_s, STEP, name, 0, (("parameters", count),))

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


MOST_ROWS = 5_000_000
"""Records that a worker keeps at most, about 350 bytes each."""
BATCH = 20_000
"""Slices in one answer."""


@remotely_callable
def read_clock() -> tuple[str, float]:
    """Returns the id of this worker's clock, and its time."""
    return current_node().clock_id, time.monotonic()


@remotely_callable
def begin(trace: int, limit: int, profiles: bool) -> None:
    """Has this worker record what it does."""
    check_types(trace=(trace, int), limit=(limit, int), profiles=(profiles, bool))
    if not 0 < limit <= MOST_ROWS:
        raise ConfigurationError(f"limit is {limit}; a worker keeps 1 to {MOST_ROWS} records")
    agent = current()
    agent.slots[RECORDER].begin(trace, _caller(agent), limit, profiles=profiles)


def _caller(agent: Agent) -> int:
    served = current_call.get()
    # The leader calls them directly for its own worker, perhaps within a call that it serves.
    is_asked = served is not None and served.function in _NAMES
    return int(served.peer.id) if served is not None and is_asked else agent.me.id


@remotely_callable
def end(trace: int) -> None:
    """Has this worker stop recording."""
    check_types(trace=(trace, int))
    agent = current()
    agent.slots[RECORDER].end(trace, _caller(agent))


@remotely_callable
def take(trace: int) -> tuple[dict[str, Any], list[Any]]:
    """Returns what is said of a recording, and its next slices; none if it has no more."""
    check_types(trace=(trace, int))
    agent = current()
    return agent.slots[RECORDER].take(trace, _caller(agent), BATCH)


@remotely_callable
def forget(trace: int) -> None:
    """Has this worker stop recording, and drop the recording."""
    check_types(trace=(trace, int))
    agent = current()
    agent.slots[RECORDER].forget(trace, _caller(agent))


_ASKED = (begin, end, take, forget)
_NAMES = frozenset({*_ASKED, *(f"{__name__}:{each.__name__}".encode() for each in _ASKED)})
"""What a call of another worker may have called."""
