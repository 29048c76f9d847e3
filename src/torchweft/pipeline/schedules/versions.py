"""Versions of the parameters in an asynchronous table: which minibatch uses which, how many live.

The optimizer of a stage steps while other minibatches are between their forward and backward pass
there. Each of them must end with the version that it began with, so the worker keeps that version
(weight stashing, PipeDream, Narayanan et al. 2019; PipeDream-2BW, Narayanan et al. 2021).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchweft.pipeline.schedules.actions import Action, Kind, Weights
from torchweft.pipeline.schedules.execution import updates_of
from torchweft.pipeline.schedules.table import Table

Work = tuple[int, int]
"""A stage and a minibatch."""


class Versions(NamedTuple):
    """The versions of the parameters that a table uses.

    Attributes:
        used: The version that each (stage, minibatch) uses: how many updates it contains.
        newest: The newest version of the stage when the forward pass of (stage, minibatch) starts.
        held: For each worker, the most versions of one stage that it keeps at once: the newest one,
            and those of which a minibatch has yet to use, or to use for the last time.
    """

    used: Mapping[Work, int]
    newest: Mapping[Work, int]
    held: tuple[int, ...]


def versions_of(table: Table) -> Versions:
    """Returns the versions that a table uses, from its updates and its rule ``weights``.

    Args:
        table: A table; a synchronous one has only version 0.
    """
    newest = _newest(table)
    used = _used(table, newest)
    held = tuple(
        max((_held(row, stage, used) for stage in table.stages_of(worker)), default=0)
        for worker, row in enumerate(table.rows)
    )
    return Versions(used, newest, held)


def _newest(table: Table) -> dict[Work, int]:
    newest: dict[Work, int] = {}
    for row in table.rows:
        made: dict[int, int] = defaultdict(int)
        for stage, kind, microbatch in map(_parts, row):
            if kind is Kind.FORWARD:
                newest[stage, microbatch] = made[stage]
            elif kind is Kind.UPDATE:
                made[stage] += 1
    return newest


def _used(table: Table, newest: Mapping[Work, int]) -> Mapping[Work, int]:
    if table.weights is Weights.STASHING:
        return newest
    if table.weights is Weights.VERTICAL_SYNC:
        return {work: newest.get((0, work[1]), 0) for work in newest}
    updates = updates_of(table.rows)
    return {
        (stage, microbatch): max(0, bisect_left(updates[stage], microbatch) - 1)
        for stage, microbatch in newest
    }


def _held(row: Sequence[Action], stage: int, used: Mapping[Work, int]) -> int:
    """Returns the most versions of ``stage`` that a worker keeps at once.

    A version lives from the update that makes it to the one that replaces it, or until its last
    minibatch has ended. An update whose old version nobody needs writes over it.
    """
    made = [0]  # by version: the place in the row where it comes into being
    ends: dict[int, int] = defaultdict(int)  # by version: the place after its last use
    for place, (where, kind, microbatch) in enumerate(map(_parts, row)):
        if where == stage and kind is Kind.UPDATE:
            made.append(place)
        elif where == stage:
            version = used.get((stage, microbatch), 0)
            ends[version] = place + 1
    changes: dict[int, int] = defaultdict(int)
    for version, place in enumerate(made):
        replaced = made[version + 1] if version + 1 < len(made) else len(row)
        changes[place] += 1
        changes[max(replaced, ends[version])] -= 1
    held = peak = 0
    for place in sorted(changes):
        held += changes[place]
        peak = max(peak, held)
    return peak


def _parts(action: Action) -> tuple[int, Kind, int]:
    return action.stage, action.kind, action.microbatch
