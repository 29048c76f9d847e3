"""Takes what ``torch.profiler`` records in a worker while the worker is traced.

Each profile that ends meanwhile is taken, whoever has started it. Its events tell the time since
1970; the difference to the clock of traces is measured when the profile ends.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile as Profile

from torchweft.protocol.observing.trace import Row
from torchweft.threads.reports import log_exception

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
