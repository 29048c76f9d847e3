"""Text about a graph of waits: where a group is stuck, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchweft.protocol.observing import circles
from torchweft.protocol.observing.waits import LEAST_S, Activity, WaitGraph

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
            waiting = [graph.activities[each] for each in circles.waiting_for(needs, name)]
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
