"""Writes the row of one worker from phases: "so many times these actions"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchweft.pipeline.schedules.actions import Action, Kind

Work = tuple[int, int]
"""A stage and a micro-batch."""


class Lane(NamedTuple):
    """The order in which a worker takes up forward and backward passes.

    Attributes:
        forward: The order of the forward passes.
        backward: The order of the backward passes, whole or of the input only.
    """

    forward: Sequence[Work]
    backward: Sequence[Work]


class Phase(NamedTuple):
    """A part of a row that repeats.

    Attributes:
        times: The number of repetitions.
        pattern: Names of actions. ``F0``, ``B0`` and ``I0`` are the next forward pass, backward
            pass and input part of lane 0. ``W`` is the weight part of the oldest ``I`` that has
            none yet. A name is passed over once there is nothing left for it to do: so the last
            repetitions of ``F0 B0`` are backward passes only.
    """

    times: int
    pattern: str


def write_row(phases: Iterable[Phase], *lanes: Lane) -> tuple[Action, ...]:
    """Returns the row of the worker that goes through ``phases``."""
    queues: dict[str, deque[Work]] = {"W": deque()}
    for number, lane in enumerate(lanes):
        queues[f"F{number}"] = deque(lane.forward)
        queues[f"B{number}"] = queues[f"I{number}"] = deque(lane.backward)
    row: list[Action] = []
    for times, pattern in phases:
        names = pattern.split()
        for _ in range(times):
            for name in names:
                if not queues[name]:
                    continue
                stage, microbatch = work = queues[name].popleft()
                row.append(Action(stage, Kind(name[0]), microbatch))
                if name.startswith("I"):
                    queues["W"].append(work)
    return tuple(row)


def split_backward(lane: Lane, warm_up: int, delay: int) -> list[Phase]:
    """Returns the phases of 1F1B with split backward passes on one lane.

    Args:
        lane: The lane.
        warm_up: The number of forward passes before the first input part.
        delay: The number of input parts before the first weight part.
    """
    n_passes = len(lane.forward)
    return [
        Phase(min(warm_up, n_passes), "F0"),
        Phase(delay, "F0 I0"),
        Phase(n_passes, "F0 I0 W"),
        Phase(n_passes, "W"),
    ]
