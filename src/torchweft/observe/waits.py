"""The graph of waits over all workers, made of their reports, and what it says in words.

Its nodes are activities: threads, served calls, gatherings, backward passes, values that are being
made, and workers as a whole. ``docs/protocols/observing.md`` lists which activity waits for which.

An activity waits for all, or for any one, of others. It can go on if it waits for nothing, or if
all or any of those can go on: the least such set. The rest is stuck. Where stuck activities wait
for each other in a circle, that is a deadlock: no activity outside of the circle can end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from torchweft.reports import (
    CALL,
    GATHERING,
    MESSAGE,
    PASS,
    SHUTDOWN,
    VALUE,
    Report,
    ServedCall,
    Thread,
    Wait,
    making_key,
)

Name = TypeVar("Name", bound=Hashable)


class Needs(NamedTuple):
    """What an activity needs to go on.

    Attributes:
        others: The activities for which it waits.
        of_all: Whether it needs all of them; if not, any one.
        is_stopped: Whether it cannot go on whatever others do.
    """

    others: tuple[str, ...] = ()
    of_all: bool = True
    is_stopped: bool = False

    def are_met(self, going: Iterable[str]) -> bool:
        """Returns whether it can go on, given those that can."""
        if self.is_stopped or not self.others:
            return not self.is_stopped
        met = [other in going for other in self.others]
        return all(met) if self.of_all else any(met)


Graph = Mapping[str, Needs]
"""The activities by name. Every activity that another needs is in it."""


def stuck(graph: Graph) -> set[str]:
    """Returns the activities that cannot go on."""
    waiters: dict[str, list[str]] = {}
    for name, needs in graph.items():
        for other in needs.others:
            waiters.setdefault(other, []).append(name)
    going = {name for name, needs in graph.items() if needs.are_met(())}
    todo = deque(going)
    while todo:
        for waiter in waiters.get(todo.popleft(), ()):
            if waiter not in going and graph[waiter].are_met(going):
                going.add(waiter)
                todo.append(waiter)
    return set(graph) - going


def circles(graph: Graph) -> list[list[str]]:
    """Returns a shortest circle of each part of the stuck graph that leads back to itself.

    A circle begins with its first name in the order of names, and each activity waits for the next
    one, the last for the first. Circles are in the order of names as well.
    """
    among = stuck(graph)
    waits = {
        name: [other for other in graph[name].others if other in among] for name in sorted(among)
    }
    found: list[list[str]] = []
    seen: set[str] = set()
    for name in waits:
        if name in seen:
            continue
        part = {name, *_reached(waits, name)} & _reached(_reversed(waits), name)
        seen |= part
        if part:
            found.append(min((_circle(waits, part, each) for each in sorted(part)), key=len))
    return found


def waiting_for(graph: Graph, name: str) -> set[str]:
    """Returns the activities that wait for one, directly or through others."""
    return _reached(_reversed({each: needs.others for each, needs in graph.items()}), name) - {name}


def _reversed(waits: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in waits}
    for name, others in waits.items():
        for other in others:
            found[other].append(name)
    return found


def _reached(waits: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Returns what is reached from an activity in one step or more."""
    found: set[str] = set()
    todo = deque(waits[start])
    while todo:
        name = todo.popleft()
        if name not in found:
            found.add(name)
            todo.extend(waits[name])
    return found


def _circle(waits: Mapping[str, Iterable[str]], part: set[str], start: str) -> list[str]:
    """Returns a shortest way from an activity of a strongly connected part back to it."""
    came_from: dict[str, str] = {}
    todo = deque([start])
    while todo:
        name = todo.popleft()
        for other in waits[name]:
            if other == start:
                way = [name]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other in part and other not in came_from:
                came_from[other] = name
                todo.append(other)
    raise AssertionError("the part is not strongly connected")


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
        return [[self.activities[name] for name in circle] for circle in circles(self.needs)]

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
            waits = (told,)
            self.activities[name] = Activity(report.worker, subject, "", waits, call.age_s, needs)
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
        self.activities[name] = Activity(
            worker,
            subject,
            place,
            _any_told(waits) if needs_any else tuple(map(_told, waits)),
            max((wait.age_s for wait in waits), default=0.0),
            Needs(targets, of_all=not needs_any) if is_old else Needs(),
            is_wait=bool(waits),
            is_leaving=_is_leaving(waits),
        )

    def _add_locked(self, report: Report) -> None:
        """Has threads that are at a lock wait for any other activity there that waits."""
        others = [
            name
            for name, each in self.activities.items()
            if each.worker == report.worker and each.is_wait and not each.is_leaving
        ]
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


_MOST_CAUSES = 5
_MOST_WAITERS = 6


def explain(graph: WaitGraph) -> str:
    """Returns where the group is stuck, in a few lines; each line names a worker and its line."""
    lines: list[str] = []
    for circle in graph.circles():
        lines += [*_deadlock(circle), ""]
    lines += _causes(graph, of_leaving=False)
    if not lines:
        lines += _causes(graph, of_leaving=True)
    if not lines:
        reports = len(graph.reports)
        lines = [f"no thread of {reports} workers has waited for long for another worker"]
    return "\n".join(lines).rstrip()


def as_json(graph: WaitGraph) -> dict[str, object]:
    """Returns the same for programs: the deadlocks, and all activities that wait."""
    return {
        "deadlocks": [
            {
                "is_sure": all(activity.is_sure for activity in circle),
                "activities": [_fields(activity) for activity in circle],
            }
            for circle in graph.circles()
        ],
        "waits": [_fields(each) for each in graph.activities.values() if each.is_wait],
        "silent": graph.silent,
    }


def _fields(activity: Activity) -> dict[str, object]:
    return {
        "worker": activity.worker,
        "activity": activity.subject,
        "place": activity.place,
        "waits_for": list(activity.waits),
        "age_s": round(activity.age_s, 3),
    }


def _deadlock(circle: Sequence[Activity]) -> list[str]:
    workers = sorted({activity.worker for activity in circle if activity.worker})
    perhaps = "" if all(activity.is_sure for activity in circle) else ", perhaps"
    names = _listed(workers)
    each = "for each other" if len(workers) > 1 else "for itself"
    verb = "wait" if len(workers) > 1 else "waits"
    lines = [f"deadlock{perhaps}: {names} {verb} {each}"]
    for activity in circle:
        if activity.waits:  # Others are on the way from one that waits to the next.
            lines += _described(activity, "  ")
    return lines


def _described(activity: Activity, indent: str) -> list[str]:
    where = f"{activity.worker}: " if activity.worker else ""
    line = f"{indent}{where}{activity.subject}"
    if activity.place:
        line += f"\n{indent}  at {activity.place}"
    if activity.waits:
        since = f" for {activity.age_s:.1f} s" if activity.age_s else ""
        line += f"\n{indent}  waits{since}: {_listed(activity.waits)}"
    return line.split("\n")


def _causes(graph: WaitGraph, *, of_leaving: bool) -> list[str]:
    """Returns the activities for which others wait, and which wait for none themselves.

    Args:
        graph: The graph.
        of_leaving: Whether to return those of waits in ``shutdown``, where it is usual to wait for
            others that work: only those that cannot go on. If not, those of all other waits.
    """
    needs = graph.needs
    found: list[tuple[int, str, list[Activity]]] = []
    for name in graph.activities:
        if not needs[name].others and (needs[name].is_stopped or not of_leaving):
            waiting = [graph.activities[each] for each in waiting_for(needs, name)]
            late = [
                each
                for each in waiting
                if each.is_wait and each.is_leaving == of_leaving and each.age_s >= LEAST_S
            ]
            if late:
                found.append((len(late), name, late))
    found.sort(key=lambda cause: (-cause[0], cause[1]))
    lines: list[str] = []
    for _, name, late in found[:_MOST_CAUSES]:
        cause = graph.activities[name]
        workers = sorted({each.worker for each in late})
        lines.append(f"{_listed(workers)} wait{'' if len(workers) > 1 else 's'}, in the end, for")
        lines += _described(cause, "  ")
        for each in sorted(late, key=lambda each: -each.age_s)[:_MOST_WAITERS]:
            lines += _described(each, "    ")
        lines.append("")
    return lines


def _listed(texts: Iterable[str]) -> str:
    found = list(texts)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
