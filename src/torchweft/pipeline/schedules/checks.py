"""Checks that a table is complete and can be run to its end.

The rules: every stage has one forward and one backward pass of every micro-batch, all on one
worker; the backward pass is whole, or an input part and a weight part. Updates, if there are any,
take in every minibatch, and are the same on all replicas of a stage. Every worker can run its row
in order, with receives that block and sends that do not, without waiting for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import TableError
from torchweft.pipeline.schedules.actions import (
    Action,
    Edges,
    Kind,
    Run,
    chain,
    results_of,
    run,
    updates_of,
)
from torchweft.pipeline.schedules.pipedream import versions_of
from torchweft.pipeline.schedules.table import Table


class Place(NamedTuple):
    """Where an action is in a table."""

    worker: int
    position: int

    def __str__(self) -> str:
        return f"worker {self.worker}, position {self.position}"


Places = Mapping[Action, Place]


def check(table: Table, edges: Edges | None = None) -> None:
    """Checks that a table is complete and can be run to its end.

    Args:
        table: The table.
        edges: The stage graph: pairs of stages, where the output of the first is an input of the
            second. A chain of all stages if it is not given.

    Raises:
        TableError: An action is missing, is there twice, is on the wrong worker, or waits for ever.
        ConfigurationError: An edge names a stage that the table does not have.
    """
    edges = checked_edges(table, edges)
    places = _places(table)
    for stage, microbatch in itertools.product(range(table.n_stages), range(table.n_microbatches)):
        _check_passes(table, places, stage, microbatch)
    if table.is_asynchronous:
        _check_updates(table)
    ran = run(table.rows, edges, lambda action: 0.0)
    if ran.missing:
        raise _stuck(table, ran)
    _check_versions(table, places)


def checked_edges(table: Table, edges: Edges | None) -> Edges:
    """Returns the edges of a stage graph, by default of a chain.

    Raises:
        ConfigurationError: An edge names a stage that the table does not have.
    """
    for edge in edges or ():
        if not all(0 <= stage < table.n_stages for stage in edge):
            raise ConfigurationError(
                f"edge {edge!r} names a stage that {table.name} does not have; its stages are "
                f"0 to {table.n_stages - 1}"
            )
    return chain(table.n_stages) if edges is None else edges


def _places(table: Table) -> Places:
    """Returns the place of each action except updates."""
    places: dict[Action, Place] = {}
    for worker, row in enumerate(table.rows):
        for position, action in enumerate(row):
            place = Place(worker, position)
            is_stage = 0 <= action.stage < table.n_stages
            if not (is_stage and 0 <= action.microbatch < table.n_microbatches):
                raise _error(
                    f"{action} is out of range; {table.name} has the stages 0 to "
                    f"{table.n_stages - 1} and the micro-batches 0 to {table.n_microbatches - 1}",
                    action,
                    place,
                )
            if action.kind is not Kind.UPDATE and places.setdefault(action, place) != place:
                raise _error(
                    f"{action} is already at {places[action]}; remove one of them", action, place
                )
    return places


def _check_passes(table: Table, places: Places, stage: int, microbatch: int) -> None:
    """Checks that one stage has both passes of one micro-batch, on one worker."""
    forward, whole, of_input, of_weight = (
        Action(stage, kind, microbatch)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if forward not in places:
        raise _error(f"no worker runs {forward}, which {table.name} needs", forward)
    home = places[forward]
    present = [each for each in (whole, of_input, of_weight) if each in places]
    for each in present:
        if places[each].worker != home.worker:
            raise _error(f"{each} must be on the worker of {forward} ({home})", each, places[each])
    if present in ([whole], [of_input, of_weight]):
        return
    wanted = f"a backward pass is either {whole}, or {of_input} and {of_weight}"
    if whole in present:
        raise _error(
            f"{present[1]} repeats a part of {whole} ({places[whole]}); {wanted}",
            present[1],
            places[present[1]],
        )
    missing = whole if not present else of_weight if of_input in present else of_input
    raise _error(
        f"{missing} is missing, of {forward} (position {home.position}); {wanted}",
        missing,
        home.worker,
    )


def _check_updates(table: Table) -> None:
    """Checks that every replica runs the updates of its stage, each once and in their order."""
    updates = updates_of(table.rows)
    last = table.n_microbatches - 1
    for stage in range(table.n_stages):
        due = [Action(stage, Kind.UPDATE, each) for each in sorted({*updates[stage], last})]
        rule = (
            f"every replica of stage {stage} runs its {len(due)} updates, each once, in the order "
            f"of the minibatches, the last one after minibatch {last}"
        )
        for worker in table.replicas(stage):
            found = [
                (action, Place(worker, position))
                for position, action in enumerate(table.rows[worker])
                if action.kind is Kind.UPDATE and action.stage == stage
            ]
            for wanted, (action, place) in zip(due, found, strict=False):
                if action != wanted:
                    raise _error(f"{action} is where {wanted} is due: {rule}", action, place)
            if len(found) > len(due):
                action, place = found[len(due)]
                raise _error(f"{action} is there twice: {rule}", action, place)
            if len(found) < len(due):
                missing = due[len(found)]
                raise _error(f"{missing} is missing: {rule}", missing, worker)


def _check_versions(table: Table, places: Places) -> None:
    """Checks that each forward pass finds the version of the parameters that it is to use."""
    versions = versions_of(table)
    for (stage, microbatch), version in versions.used.items():
        newest = versions.newest[stage, microbatch]
        if version > newest:
            forward = Action(stage, Kind.FORWARD, microbatch)
            raise _error(
                f"{forward} is to use version {version} of the parameters "
                f"({table.weights.value}), but {newest} updates come before it in the row",
                forward,
                places[forward],
            )


def _stuck(table: Table, ran: Run) -> TableError:
    """Returns the error for a run that stopped: it names the actions that wait for each other."""
    makers = {
        result: Place(worker, position)
        for worker, row in enumerate(table.rows)
        for position, action in enumerate(row)
        for result in results_of(action)
    }
    waits = {
        worker: (Place(worker, len(ran.spans[worker])), makers[result])
        for worker, result in ran.missing.items()
    }
    seen: list[int] = []
    worker = min(waits)
    while worker not in seen:
        seen.append(worker)
        worker = waits[worker][1].worker
    circle = [waits[worker] for worker in sorted(seen[seen.index(worker) :])]
    action_at = {
        place: table.rows[place.worker][place.position] for wait in circle for place in wait
    }
    texts = [f"{head}: {action_at[head]} waits for {action_at[to]} ({to})" for head, to in circle]
    why = "later in the same row" if len(circle) == 1 else "a circle"
    head, awaited = circle[0]
    return TableError(
        f"{table.name} stops before its end, as actions wait for ever ({why}): {'; '.join(texts)}",
        worker=head.worker,
        position=head.position,
        action=str(action_at[head]),
        waits_for=str(action_at[awaited]),
    )


def _error(text: str, action: Action, where: Place | int | None = None) -> TableError:
    """Returns an error about an action at a place, or that a worker (None: any) lacks."""
    if isinstance(where, Place):
        return TableError(
            f"{where}: {text}", worker=where.worker, position=where.position, action=str(action)
        )
    prefix = "" if where is None else f"worker {where}: "
    return TableError(prefix + text, worker=where, action=str(action))
