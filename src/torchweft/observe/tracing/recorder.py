"""Records what one worker does while it is traced, and what ``torch.profiler`` records meanwhile.

Calls, backward passes, links and tensor messages tell whoever has subscribed. Each profile that
ends meanwhile is taken, whoever has started it. Its events tell the time since 1970; the difference
to the clock of traces is measured when the profile ends.

The leader of a trace calls the functions at the end of this file on the other workers. They tell
names of functions, numbers, sizes and times, which any member may see by observing; they read and
return no value of the program. So a strict worker runs them as well.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from _thread import get_ident
from collections import deque
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile as Profile
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
from torchweft.observe.tracing.notes import Names, Rows, TracedLinks, TracingWatcher
from torchweft.observe.tracing.records import STEP, Row
from torchweft.rpc.current_call import check_types
from torchweft.rpc.node import current_node
from torchweft.rpc.worker import Worker

_READINGS = 5
_NS = 1e-9


class Profiling:
    """The events of ``torch.profiler`` in one worker during one trace.

    Args:
        limit: How many events are kept.
        profiles: Whether to run a profile of all threads meanwhile.

    Attributes:
        dropped: How many events had no room.
    """

    def __init__(self, limit: int, *, profiles: bool) -> None:
        self.dropped = 0
        self._limit = limit
        self._events: deque[Row] = deque()
        self._began_s = time.monotonic()
        self._end_profile = Profile.__exit__
        _after_each(self)
        self._own: Any = None
        if profiles:
            try:
                self._own = _profile_of_all_threads()
                self._own.__enter__()
            except BaseException:  # The program may run a profile of its own.
                Profile.__exit__ = self._end_profile  # type: ignore[method-assign]
                raise

    def end(self) -> None:
        """Ends the profile, and takes no further ones."""
        if self._own is not None:
            try:
                self._own.__exit__(None, None, None)
            except Exception:  # The program may have ended it, by a profile of its own.
                log_exception("the profile of a trace could not be read")
        Profile.__exit__ = self._end_profile  # type: ignore[method-assign]

    def take(self, count: int) -> list[Row]:
        """Takes events, at most ``count``; each is a row with the fields of ``Profiled``."""
        return [self._events.popleft() for _ in range(min(count, len(self._events)))]

    def read(self, profile: Any) -> None:
        """Takes the events of a profile that has ended."""
        results = getattr(profile, "kineto_results", None)
        if results is None:
            return
        since_s, least_s = _since_1970_s(), self._began_s
        for event in results.events():
            began_s = event.start_ns() * _NS - since_s
            if began_s < least_s:
                continue
            if len(self._events) >= self._limit:
                self.dropped += 1
                continue
            device = event.device_type()
            is_host = device == DeviceType.CPU
            name = "" if is_host else f"{device.name.lower()}:{event.device_index()}"
            ended_s = began_s + event.duration_ns() * _NS
            lane = event.device_resource_id()
            self._events.append((began_s, ended_s, name, lane, event.name()))


def _profile_of_all_threads() -> Any:
    settings: dict[str, Any] = {"use_kineto": True}
    if torch.cuda.is_available():
        settings["use_device"] = "cuda"
    with contextlib.suppress(TypeError):  # Older versions of torch see the calling thread only.
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        settings["experimental_config"] = every
    return Profile(**settings)


def _after_each(profiling: Profiling) -> None:
    """Has profiles read when they end."""
    end = Profile.__exit__

    def end_and_read(self: Any, *error: Any) -> Any:
        result = end(self, *error)  # type: ignore[no-untyped-call]
        try:
            profiling.read(self)
        except Exception:  # The program goes on without.
            log_exception("a profile could not be added to the trace")
        return result

    Profile.__exit__ = end_and_read  # type: ignore[method-assign]


def _since_1970_s() -> float:
    """Returns the difference between the time since 1970 and the clock of traces."""
    found = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        found.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(found)[1]


class Recording:
    """What one worker has noted for one trace.

    Args:
        trace: The number of the trace.
        leader: The id of the worker that leads it.
        limit: How many rows are kept.
        profiling: Takes what ``torch.profiler`` records.
    """

    def __init__(self, trace: int, leader: int, limit: int, profiling: Profiling) -> None:
        self.trace = trace
        self.leader = leader
        self.rows = Rows(limit)
        self.began_s = time.monotonic()
        self.ended_s = 0.0
        self.own_calls: list[tuple[int, int]] = []
        self.links = TracedLinks(self.rows)
        self.counted: list[tuple[int, int, int]] = []
        self.dropped = 0
        self.profiling = profiling


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
        return self._recording is not None and not self._recording.ended_s

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
            recording = Recording(trace, leader, limit, Profiling(limit, profiles=profiles))
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
            self.forget(recording.trace, recording.leader)

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
        if recording is not None:
            recording.links.begin(link, peer.id)

    def _switch_off(self, recording: Recording) -> None:
        agent, worker = self._agent, self._worker
        agent.links.on_made = None
        recording.links.end()
        worker.tensor_messages.on_pulled = None
        worker.tensor_messages.on_offered = None
        worker.tensor_messages.on_fetched = None
        for hook in self._hooks:
            hook.remove()
        if self._watcher is not None:
            worker.unwatch(self._watcher)

    def end(self, trace: int, leader: int) -> dict[str, Any]:
        """Stops noting; returns plain values about the recording, without its rows.

        Args:
            trace: The number of the trace.
            leader: The worker that says so.

        Raises:
            ObserveError: The worker does not record that trace.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            if not recording.ended_s:
                self._note_own_call(recording)
                recording.counted = recording.links.counted()
                self._switch_off(recording)
                recording.ended_s = time.monotonic()
                recording.dropped = recording.rows.end()
                recording.profiling.end()
            return self._about(recording)

    def _about(self, recording: Recording) -> dict[str, Any]:
        me, profiling = self._agent.me, recording.profiling
        return {
            "id": me.id,
            "name": me.name,
            "rank": me.info.id,
            "pid": os.getpid(),
            "host": str(me.registration.facts.get(HOST, "")),
            "began_s": recording.began_s,
            "ended_s": recording.ended_s,
            "peers": {peer.id: peer.name for peer in list(self._agent.peers.values())},
            "threads": {
                each.ident: (each.native_id or 0, each.name)
                for each in threading.enumerate()
                if each.ident is not None
            },
            "own_calls": recording.own_calls,
            "links": recording.counted,
            "dropped": recording.dropped,
            "profiled_dropped": profiling.dropped,
        }

    def take(self, trace: int, leader: int, count: int) -> tuple[list[Row], list[Row]]:
        """Takes rows out of a recording that has ended, and events of ``torch.profiler``.

        When there is none left, the recording is over.

        Args:
            trace: The number of the trace.
            leader: The worker that says so.
            count: How many of each to return at most.
        """
        with self._lock:
            recording = self._checked(trace, leader)
            rows, profiling = recording.rows, recording.profiling
            taken, profiled = rows.take(count), profiling.take(count)
            if not (taken or profiled):
                self._drop()
            return taken, profiled

    def forget(self, trace: int, leader: int) -> None:
        """Ends a trace without its rows; nothing if the worker records none of that leader."""
        with self._lock:
            recording = self._recording
            if recording is None or (recording.trace, recording.leader) != (trace, leader):
                return
            if not recording.ended_s:
                self._switch_off(recording)
                recording.profiling.end()
            self._drop()

    def _drop(self) -> None:
        self._recording = None
        self._agent.off_lost(self._peer_lost)

    def close(self) -> None:
        """Ends the trace under way, if any: the worker leaves its group."""
        recording = self._recording
        if recording is not None:
            self.forget(recording.trace, recording.leader)

    def _checked(self, trace: int, leader: int) -> Recording:
        recording = self._recording
        if recording is None or (recording.trace, recording.leader) != (trace, leader):
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
"""Records in one answer."""


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
def end(trace: int) -> dict[str, Any]:
    """Has this worker stop recording; returns what it says about the recording."""
    check_types(trace=(trace, int))
    agent = current()
    return agent.slots[RECORDER].end(trace, _caller(agent))


@remotely_callable
def take(trace: int) -> tuple[list[Row], list[Row]]:
    """Returns the next rows of a recording that has ended, and of ``torch.profiler``."""
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
