"""Checks that a table is complete and can be run to its end.

The rules: every stage has one forward and one backward pass of every micro-batch, all on one
worker; the backward pass is whole, or an input part and a weight part. Every worker can run its row
in order, with receives that block and sends that do not, without waiting for ever. An update waits
for the backward passes of all minibatches since the one before it, on every replica.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import TableError
from torchweft.pipeline.schedules.table import Action, Edges, Kind, Run, Table, chain, run

Place = tuple[int, int]
"""A worker and a position in its row."""

_WHOLE = [Kind.FORWARD, Kind.BACKWARD]
_PARTS = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]


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
    _check_passes(table)
    ran = run(table.rows, edges, lambda action: 0.0)
    if ran.missing:
        raise _stuck(table, ran)


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


def _check_passes(table: Table) -> None:
    """Checks that each stage has both passes of each micro-batch, each once, on one worker."""
    found: dict[tuple[int, int], dict[Kind, Place]] = defaultdict(dict)
    work = set(itertools.product(range(table.n_stages), range(table.n_microbatches)))
    for worker, row in enumerate(table.rows):
        for position, action in enumerate(row):
            if (action.stage, action.microbatch) not in work:
                raise _error(
                    f"{action} is out of range; {table.name} has the stages 0 to "
                    f"{table.n_stages - 1} and the micro-batches 0 to {table.n_microbatches - 1}",
                    action,
                    (worker, position),
                )
            places = found[action.stage, action.microbatch]
            if action.kind is Kind.UPDATE:
                continue
            if action.kind in places:
                raise _error(f"{action} is there twice", action, (worker, position))
            if places and worker not in {home for home, _ in places.values()}:
                raise _error(
                    f"{action} is on another worker than the other actions of its stage and "
                    "micro-batch",
                    action,
                    (worker, position),
                )
            places[action.kind] = worker, position
    for stage, microbatch in sorted(work):
        places = found[stage, microbatch]
        kinds = {*places}
        wanted = _PARTS if kinds & {*_PARTS[1:]} else _WHOLE
        for kind in sorted(kinds ^ {*wanted}, key=list(Kind).index):
            action = Action(stage, kind, microbatch)
            what = "is one too many" if kind in kinds else "is missing"
            raise _error(
                f"{action} {what}: stage {stage} needs F and B of micro-batch {microbatch}, or F, "
                "I and W",
                action,
                places.get(kind) or next(iter(places.values()), (None, None))[0],
            )


def _stuck(table: Table, ran: Run) -> TableError:
    """Returns the error for a run that stopped: it says what each worker waits for."""
    waits = [
        (worker, len(ran.spans[worker]), result) for worker, result in sorted(ran.missing.items())
    ]
    texts = [
        f"worker {worker}, position {position}: {table.rows[worker][position]} waits for {result}"
        for worker, position, result in waits
    ]
    worker, position, result = waits[0]
    return TableError(
        f"{table.name} stops before its end, as actions wait for ever: {'; '.join(texts)}",
        worker=worker,
        position=position,
        action=str(table.rows[worker][position]),
        waits_for=str(result),
    )


def _error(text: str, action: Action, where: Place | int | None = None) -> TableError:
    """Returns an error about an action at a place, or that a worker (None: any) lacks."""
    if isinstance(where, tuple):
        worker, position = where
        return TableError(
            f"worker {worker}, position {position}: {text}",
            worker=worker,
            position=position,
            action=str(action),
        )
    prefix = "" if where is None else f"worker {where}: "
    return TableError(prefix + text, worker=where, action=str(action))
