"""The graph of waits over all workers, made of their reports.

Its nodes are activities: threads, served calls, gatherings, backward passes, values that are being
made, and workers as a whole. ``docs/protocols/observing.md`` lists which activity waits for which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchweft.protocol.observing import circles
from torchweft.protocol.observing.circles import Needs
from torchweft.protocol.observing.keys import (
    CALL,
    GATHERING,
    MESSAGE,
    PASS,
    SHUTDOWN,
    VALUE,
    Wait,
    making_key,
)
from torchweft.protocol.observing.report import Report, ServedCall, Thread

LEAST_S = 1.0
"""Seconds for which an activity must have waited, as reports are not of the same moment."""

_NOTHING = Needs()
_NAMED = 4
"""How many of several things, of which a thread needs any, are told."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A node of the graph.

    Attributes:
        worker: The worker where it is; empty for a gathering.
        subject: What it is: ``"thread MainThread"``, or ``"train.step (called by 'driver')"``.
        place: The line of the program where it is; empty if unknown.
        waits: What it waits for, in words, each of its own.
        age_s: Seconds for which it has waited.
        needs: What it needs to go on.
        is_sure: Whether it surely waits for one of these.
        is_wait: Whether it is a thread or a served call that waits.
        is_leaving: Whether it waits in ``shutdown``, where a worker may be for as long as others
            work.
    """

    worker: str
    subject: str
    place: str = ""
    waits: tuple[str, ...] = ()
    age_s: float = 0.0
    needs: Needs = _NOTHING
    is_sure: bool = True
    is_wait: bool = False
    is_leaving: bool = False


class WaitGraph:
    """Who waits for whom.

    Args:
        reports: The reports of workers.
        silent: Why each worker that did not report did not, as the end of a sentence.

    Attributes:
        activities: The nodes, by name.
    """

    def __init__(self, reports: Iterable[Report], silent: Mapping[str, str]) -> None:
        self.reports = {report.worker: report for report in reports}
        self.silent = dict(silent)
        self.activities: dict[str, Activity] = {}
        self._at_worker: dict[str, list[str]] = {name: [] for name in self.reports}
        self._served = {
            (name, call.key): call
            for name, report in self.reports.items()
            for call in report.served
        }
        self._making = {
            call.makes for report in self.reports.values() for call in report.served if call.makes
        }
        self._come = self._arrivals()
        for report in self.reports.values():
            self._add_report(report)
        for report in self.reports.values():
            self._add_locked(report)

    @property
    def needs(self) -> dict[str, Needs]:
        """The graph alone."""
        return {name: activity.needs for name, activity in self.activities.items()}

    def circles(self) -> list[list[Activity]]:
        """Returns the deadlocks: activities of which each waits for the next one."""
        return [
            [self.activities[name] for name in circle] for circle in circles.circles(self.needs)
        ]

    # The activities that reports name

    def _arrivals(self) -> dict[str, set[str]]:
        """Returns the workers that have come to each gathering."""
        come: dict[str, set[str]] = {}
        for report in self.reports.values():
            for thread in report.threads:
                for wait in thread.waits:
                    if wait.kind == GATHERING:
                        come.setdefault(wait.key, set()).add(report.worker)
        return come

    def _add_report(self, report: Report) -> None:
        running = {thread.serves: thread for thread in report.threads if thread.serves}
        for thread in report.threads:
            is_known = (report.worker, thread.serves) in self._served
            if not is_known and (thread.waits or self._is_of_program(thread)):
                subject = f"thread {thread.name}"
                self._add(f"thread {report.worker} {thread.name}", report, subject, thread)
        for call in report.served:
            self._add_served(report, call, running.get(call.key))

    def _is_of_program(self, thread: Thread) -> bool:
        return thread.is_main and not thread.is_idle and not thread.is_own

    def _add_served(self, report: Report, call: ServedCall, thread: Thread | None) -> None:
        name, subject = f"call {call.key}", f"{call.function} (called by {call.caller!r})"
        if not call.has_begun:
            needs = self._slots(report, call)
            told = f"it is one of {report.queued} tasks that wait for one of {report.slots} slots"
            self._put(name, Activity(report.worker, subject, "", (told,), call.age_s, needs))
        elif call.awaits:
            wait = Wait(VALUE, call.awaits, call.age_s, call.awaits, (report.worker,))
            self._add_waits(name, report.worker, subject, "", (wait,))
        elif thread is not None:
            self._add(name, report, subject, thread)
        else:
            self._add_coroutine(name, report, call, subject)

    def _add_coroutine(self, name: str, report: Report, call: ServedCall, subject: str) -> None:
        """Adds a served call without a thread: it may wait for any of the calls that it made."""
        nested = [
            Wait(CALL, each.key, each.age_s, each.function, (each.callee,))
            for each in report.made
            if each.parent == call.key
        ]
        self._add_waits(name, report.worker, subject, "", nested)
        made = self.activities[name]
        needs = made.needs._replace(of_all=False)
        self.activities[name] = replace(made, needs=needs, is_sure=not nested)

    def _slots(self, report: Report, call: ServedCall | None = None) -> Needs:
        """Returns what a task that waits in line needs: any of the calls that hold the slots."""
        if report.running < report.slots or (call is not None and call.age_s < LEAST_S):
            return Needs()
        waiting = {thread.serves for thread in report.threads if thread.waits}
        holders = [
            f"call {each.key}"
            for each in report.served
            if each.has_begun and each.key not in waiting and not each.awaits
        ]
        return Needs(tuple(holders), of_all=False)

    def _add(self, name: str, report: Report, subject: str, thread: Thread) -> None:
        needs_any = thread.needs_any
        self._add_waits(name, report.worker, subject, thread.place, thread.waits, needs_any)

    def _add_waits(
        self,
        name: str,
        worker: str,
        subject: str,
        place: str,
        waits: Iterable[Wait],
        needs_any: bool = False,
    ) -> None:
        waits = tuple(waits)
        targets = tuple(self._target(worker, wait) for wait in waits)
        is_old = any(wait.age_s >= LEAST_S for wait in waits)
        activity = Activity(
            worker,
            subject,
            place,
            _any_told(waits) if needs_any else tuple(map(_told, waits)),
            max((wait.age_s for wait in waits), default=0.0),
            Needs(targets, of_all=not needs_any) if is_old else Needs(),
            is_wait=bool(waits),
            is_leaving=_is_leaving(waits),
        )
        self._put(name, activity)

    def _put(self, name: str, activity: Activity) -> None:
        self.activities[name] = activity
        self._at_worker[activity.worker].append(name)

    def _add_locked(self, report: Report) -> None:
        """Has threads that are at a lock wait for any other activity there that waits."""
        here = {each: self.activities[each] for each in self._at_worker[report.worker]}
        others = [name for name, each in here.items() if each.is_wait and not each.is_leaving]
        for thread in report.threads:
            name = f"call {thread.serves}" if thread.serves else ""
            if not thread.serves:
                name = f"thread {report.worker} {thread.name}"
            found = self.activities.get(name)
            if thread.is_at_lock and not thread.waits and found is not None and others:
                held = " or ".join(self.activities[each].subject for each in others[:3])
                told = (f"a lock or event, perhaps for {held}",)
                needs = Needs(tuple(others), of_all=False)
                self.activities[name] = replace(
                    found, waits=told, needs=needs, is_sure=False, is_wait=True
                )

    # What they wait for

    def _target(self, worker: str, wait: Wait) -> str:
        """Returns the activity that a wait is for, which is added if no report names it."""
        return _TARGETS[wait.kind](self, worker, wait)

    def _call(self, worker: str, wait: Wait) -> str:
        callee, name = wait.workers[0], f"call {wait.key}"
        if (callee, wait.key) not in self._served:
            needs = Needs()
            if callee not in self.reports:
                needs = Needs((self._worker(callee),))
            self._add_other(name, callee, f"{wait.name} (called by {worker!r})", needs)
        return name

    def _gathering(self, worker: str, wait: Wait) -> str:
        name = f"gathering {wait.key}"
        if name not in self.activities:
            missing = [each for each in wait.workers if each not in self._come[wait.key]]
            # First: the threads of a worker that is missing may wait for this gathering's workers.
            self._add_other(name, "", wait.name, Needs())
            needs = Needs(tuple(self._worker(each) for each in missing))
            lacks = (f"{_names(missing)} to come to it",) if missing else ()
            self.activities[name] = Activity("", wait.name, "", lacks, wait.age_s, needs)
        return name

    def _pass(self, worker: str, wait: Wait) -> str:
        name = f"pass {wait.key}"
        parts = []
        for each in wait.workers:
            part = f"part of {each} in pass {wait.key}"
            report = self.reports.get(each)
            is_stuck = report is not None and report.queued > 0
            needs = Needs()
            if report is None:
                needs = Needs((self._worker(each),))
            elif is_stuck:
                needs = self._slots(report)
            self._add_other(part, each, "its part of the backward pass", needs)
            parts.append(part)
        lacks = (f"{_names(wait.workers)} to report",)
        subject = f"the backward pass of {worker!r}"
        self.activities[name] = Activity("", subject, "", lacks, wait.age_s, Needs(tuple(parts)))
        return name

    def _value(self, worker: str, wait: Wait) -> str:
        name, owner = f"value {wait.key}", wait.workers[0]
        if name not in self.activities:
            needs = Needs()
            if wait.key in self._making:
                needs = Needs((f"call {making_key(wait.key)}",))
            elif owner not in self.reports:
                needs = Needs((self._worker(owner),))
            elif self.reports[owner].queued:
                needs = self._slots(self.reports[owner])
            self._add_other(name, owner, f"the value of {wait.key}", needs)
        return name

    def _shutdown(self, worker: str, wait: Wait) -> str:
        name = f"shutdown of {worker}"
        needs = Needs(tuple(self._worker(each) for each in wait.workers))
        lacks = (f"{_names(wait.workers)}",)
        self.activities[name] = Activity("", "the shutdown", "", lacks, wait.age_s, needs)
        return name

    def _message(self, worker: str, wait: Wait) -> str:
        return self._worker(wait.workers[0])

    def _add_other(self, name: str, worker: str, subject: str, needs: Needs) -> None:
        self.activities.setdefault(name, Activity(worker, subject, needs=needs))

    def _worker(self, worker: str) -> str:
        """Returns the name of a worker as a whole, of which any activity may do what it lacks."""
        name = f"worker {worker}"
        if name in self.activities:
            return name
        report = self.reports.get(worker)
        if report is None:
            why = self.silent.get(worker, "has not been asked")
            needs = Needs(is_stopped=True)
            self.activities[name] = Activity(worker, f"worker {worker!r}, which {why}", needs=needs)
            return name
        # A thread in ``shutdown`` does nothing else any more.
        own = [
            each
            for each in report.threads
            if not _is_leaving(each.waits) and (self._is_of_program(each) or each.waits)
        ]
        names = [f"thread {worker} {each.name}" for each in own if not each.serves]
        names += [f"call {each.key}" for each in report.served]
        subject = f"worker {worker!r}" if names else f"worker {worker!r}, which does nothing"
        needs = Needs(tuple(dict.fromkeys(names)), of_all=False)
        # Other threads of the program may do anything.
        is_sure = not any(
            not (each.is_main or each.is_own or each.is_idle or each.serves or each.waits)
            for each in report.threads
        )
        self.activities[name] = Activity(worker, subject, needs=needs, is_sure=is_sure)
        return name


_TARGETS = {
    CALL: WaitGraph._call,
    GATHERING: WaitGraph._gathering,
    PASS: WaitGraph._pass,
    VALUE: WaitGraph._value,
    SHUTDOWN: WaitGraph._shutdown,
    MESSAGE: WaitGraph._message,
}


def _is_leaving(waits: Sequence[Wait]) -> bool:
    return bool(waits) and all(wait.kind == SHUTDOWN for wait in waits)


def _told(wait: Wait) -> str:
    if wait.kind == CALL:
        return f"{wait.workers[0]!r} to run {wait.name}"
    if wait.kind == MESSAGE:
        return f"{wait.workers[0]!r} to send {wait.name}"
    return wait.name


def _any_told(waits: Sequence[Wait]) -> tuple[str, ...]:
    """Returns the text of waits of which any lets the thread go on."""
    more = f" or {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
    return (" or ".join(map(_told, waits[:_NAMED])) + more,)


def _names(workers: Iterable[str]) -> str:
    return ", ".join(map(repr, workers))
