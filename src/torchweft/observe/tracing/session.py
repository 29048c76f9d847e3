"""Leads a trace: begins it on all workers, aligns their clocks, collects and writes it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchweft.arguments import wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError, ObserveError, WorkerLost
from torchweft.extending import Member, ignore_errors, present_workers, this_worker
from torchweft.files import replacing
from torchweft.observe.tracing import chrome, recorder
from torchweft.observe.tracing.chrome import SAME, Alignment, Traced
from torchweft.observe.tracing.reading import Graph, graph_of, load
from torchweft.observe.tracing.recorder import RECORDER
from torchweft.observe.tracing.slices import Slice
from torchweft.probe import clock_id
from torchweft.reports import Lead, lead_of
from torchweft.rpc import rpc_async, rpc_sync

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "path": (str, os.PathLike),
    "profiler": (bool,),
    "limit": (int,),
    "timeout": (float, int),
}
LIMIT = 200_000
TIMEOUT_S = 30.0
_READINGS = 16


class Trace:
    """Records what all workers of the group do in a block, and writes it as one file.

    The worker that enters the block leads the trace. Open the file in https://ui.perfetto.dev, or
    pass it to ``torchweft trace``. One trace at a time; a worker that joins meanwhile has no part.
    The file is written also if the block raises.

    Args:
        path: The file, which is replaced.
        profiler: Whether ``torch.profiler`` runs on all workers meanwhile.
        limit: How many records each worker keeps, about 350 bytes each. For new records the oldest
            are dropped, and ``dropped`` counts them.
        timeout: Seconds to wait for the other workers, at the begin and at the end.

    Raises:
        ConfigurationError: The file cannot be made in its folder, or a number is not positive.
        ObserveError: A worker is traced already, at the begin of the block; or the file cannot be
            written, at its end.
        NotInitialized: This process is no worker.

    Attributes:
        path: The file.
        missing: Workers without records, and why.
        clock_error_s: By how much the times of two workers may be shifted against each other, in
            seconds; 0 if all run on one host.
        dropped: How many records had no room, by the name of the worker.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        profiler: bool = False,
        limit: int = LIMIT,
        timeout: float = TIMEOUT_S,
    ) -> None:
        given = {"path": path, "profiler": profiler, "limit": limit, "timeout": timeout}
        for name, kinds in _ARGUMENTS.items():
            if not isinstance(given[name], kinds):
                raise wrong_type(name, given[name], f"pass one of type {kinds[0].__name__}")
        if not 0 < limit <= recorder.MOST_ROWS:
            raise ConfigurationError(
                f"limit is {limit}; a worker keeps from 1 to {recorder.MOST_ROWS} records"
            )
        if not timeout > 0:
            raise ConfigurationError(f"timeout is {timeout}; pass a positive number of seconds")
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"the folder {str(self.path.parent)!r} does not exist")
        if self.path.is_dir():
            raise ConfigurationError(f"{str(self.path)!r} is a folder; pass the name of a file")
        if self.path.exists() and not self.path.is_file():
            raise ConfigurationError(f"{str(self.path)!r} is a device or pipe; pass another name")
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"no file can be made in the folder {str(self.path.parent)!r}; pass another one"
            )
        self.missing: dict[str, str] = {}
        self.clock_error_s = 0.0
        self.dropped: dict[str, int] = {}
        self._profiles = profiler
        self._limit = limit
        self._timeout_s = float(timeout)
        self._id = secrets.randbits(62)
        self._traced: list[Member] = []
        self._leads: dict[int, Lead | None] = {}
        self._has_ended = False
        self._began_s = 0.0

    # The block

    def __enter__(self) -> Trace:
        me = this_worker()
        others = [peer for peer in present_workers() if not peer.is_self]
        clocks = self._ask(others, recorder.read_clock)
        for peer in others:
            if peer.id in clocks:
                try:
                    self._leads[peer.id] = self._lead(peer, clocks[peer.id][0])
                except (WorkerLost, TimeoutError) as error:
                    self.missing[peer.name] = _reason(error)
        reached = [peer for peer in others if peer.id in self._leads]
        arguments = (self._id, self._limit, self._profiles)
        try:
            begun: dict[int, Any] = {}
            rest = sorted([*reached, me], key=lambda peer: peer.id)
            while rest and not begun:  # Of traces that begin at once, one gets the first worker.
                begun = self._begin([rest.pop(0)], arguments)
            begun |= self._begin(rest, arguments)
            self._traced = [peer for peer in reached if peer.id in begun]
        except BaseException:
            self._give_up(reached)
            raise
        self._traced.append(me)
        self._began_s = time.monotonic()
        return self

    def _begin(self, peers: Iterable[Member], arguments: tuple[Any, ...]) -> dict[int, Any]:
        """Has workers begin to note; returns those that do, by id."""
        begun = self._ask([peer for peer in peers if not peer.is_self], recorder.begin, arguments)
        for me in [peer for peer in peers if peer.is_self]:
            RECORDER.get().begin(self._id, me.id, self._limit, profiles=self._profiles)
            begun[me.id] = None
        return begun

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._finish()
        except BaseException:
            self._give_up(self._traced)
            if error is None:
                raise
            # The block's own error says more.

    def _finish(self) -> None:
        me = this_worker()
        others = [peer for peer in self._traced if not peer.is_self]
        RECORDER.get().end(self._id, me.id)
        ended = {me.id} | self._ask(others, recorder.end, (self._id,)).keys()
        traced: list[Traced] = []
        for peer in self._traced:
            if peer.id in ended:
                try:
                    about, slices = self._take(peer)
                    traced.append(Traced(about, slices, self._alignment(peer)))
                except (WorkerLost, TimeoutError, ConnectionError) as error:
                    self.missing[peer.name] = _reason(error)
        for peer in present_workers():
            if peer not in self._traced and peer.name not in self.missing:
                self.missing[peer.name] = "it joined after the begin of the trace"
        traced.sort(key=lambda each: int(each.about["rank"]))
        errors = sorted([each.alignment.error_s for each in traced])
        self.clock_error_s = sum(errors[-2:])  # The two worst clocks, compared with each other.
        self.dropped = {
            each.about["name"]: each.about["dropped"] for each in traced if each.about["dropped"]
        }
        self._give_up([peer for peer in self._traced if peer.name in self.missing])
        self._write(traced)
        self._has_ended = True

    def _give_up(self, peers: Iterable[Member]) -> None:
        """Has all workers stop, and drop what they have recorded; waits for none."""
        for peer in peers:
            if not peer.is_self and peer.lost is None:
                told = rpc_async(peer.info, recorder.forget, (self._id,), timeout=self._timeout_s)
                ignore_errors(told)
        RECORDER.get().forget(self._id, this_worker().id)

    def _ask(
        self, peers: Iterable[Member], function: Callable[..., Any], args: tuple[Any, ...] = ()
    ) -> dict[int, Any]:
        """Calls a function on several workers; returns the results of those that answer.

        Raises:
            ObserveError: A worker refuses.
        """
        calls = {}
        for peer in peers:
            try:
                calls[peer] = rpc_async(peer.info, function, args, timeout=self._timeout_s)
            except (WorkerLost, LookupError) as error:
                self.missing[peer.name] = _reason(error)
        results, refusals = {}, []
        for peer, call in calls.items():
            try:
                results[peer.id] = call.wait()
            except (WorkerLost, TimeoutError) as error:
                self.missing[peer.name] = _reason(error)
            except ObserveError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]
        return results

    def _take(self, peer: Member) -> tuple[dict[str, Any], list[Slice]]:
        """Takes what a worker has recorded; returns what is said of it, and the slices."""
        slices: list[Slice] = []
        while True:
            if peer.is_self:
                about, some = RECORDER.get().take(self._id, peer.id)
            else:
                args = (self._id,)
                about, some = rpc_sync(peer.info, recorder.take, args, timeout=self._timeout_s)
            if not some:
                return about, slices
            slices += map(Slice._make, some)

    # Clocks

    def _lead(self, peer: Member, clock: str) -> Lead | None:
        """Measures by how much a clock is ahead; None if this worker reads the same clock."""
        return None if clock and clock == clock_id() else self._measure(peer)

    def _measure(self, peer: Member) -> Lead:
        readings = []
        for _ in range(_READINGS):
            sent_s = time.monotonic()
            _, read_s = rpc_sync(peer.info, recorder.read_clock, timeout=self._timeout_s)
            readings.append((sent_s, read_s, time.monotonic()))
        return lead_of(readings)

    def _alignment(self, peer: Member) -> Alignment:
        first = self._leads.get(peer.id)
        return SAME if first is None else Alignment(first, self._measure(peer))

    # The result

    def _write(self, traced: Sequence[Traced]) -> None:
        about = {
            "leader": this_worker().name,
            "clock_error_us": round(self.clock_error_s * 1e6, 3),
            "missing": self.missing,
            "workers": [
                {
                    **{name: value for name, value in each.about.items() if name != "tracks"},
                    "clock_error_us": round(each.alignment.error_s * 1e6, 3),
                }
                for each in traced
            ],
        }
        try:
            # The whole file or none: a reader never finds a part.
            with replacing(self.path, "w") as file:
                chrome.write(file, traced, about, self._began_s)
        except OSError as error:
            raise ObserveError(f"the trace cannot be written to {self.path}: {error}") from error

    def graph(self, context_id: int) -> Graph:
        """Returns the distributed graph of an autograd context, as far as the trace has it.

        Args:
            context_id: The number of the context.

        Raises:
            ObserveError: The block has not ended, or no message of the context is in the trace.
        """
        if not isinstance(context_id, int):
            raise ArgumentTypeError(
                f"context_id is a {type(context_id).__name__}; pass the number of the context"
            )
        if not self._has_ended:
            raise ObserveError("the trace has no messages yet: leave its block first")
        return graph_of(load(self.path), context_id)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
