"""Which activities of a graph of waits are stuck, and the circles among them.

An activity waits for all, or for any one, of others. It can go on if it waits for nothing, or if
all or any of those can go on: the least such set. The rest is stuck. Where stuck activities wait
for each other in a circle, that is a deadlock: no activity outside of the circle can end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

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
