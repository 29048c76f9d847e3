"""One server's part of a dynamic table: rows of any ids, which come and go with the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.embedding import initial
from torchweft.embedding.errors import CapacityError, InputError
from torchweft.embedding.idmap import Ints
from torchweft.embedding.plan import Layout, Stack
from torchweft.embedding.roster import Roster
from torchweft.embedding.rows import Part, put, take
from torchweft.embedding.shard import Gradients, Shard
from torchweft.engine.codec.registry import rebuilds_plain

ROWS: Final = "rows."
WAITING: Final = "waiting."
"""How the names of tensors begin in a snapshot: of ids with rows, and of those without."""
ALL: Final = "all."
"""How those of all ids begin in an increment, whose other tensors are of changed ones."""
_MARKS: Final = ("ids", "counts", "ages", "firsts")
_VALUE_PARTS: Final = 2


@rebuilds_plain
class Occupancy(NamedTuple):
    """The ids of a dynamic table.

    Attributes:
        rows: Ids that have rows now.
        capacity: The largest number of rows.
        waiting: Ids that were seen, but not often enough for a row.
        admitted: Ids that have got rows since the tables were made.
        evicted: Ids that have lost them to others, or have expired.
        dropped: Waiting ids that have lost their counts to others, or have expired.
    """

    rows: int
    capacity: int
    waiting: int
    admitted: int
    evicted: int
    dropped: int


class DynamicShard(Shard):
    """Rows of one dynamic table; not thread-safe. Its rows in messages are ids.

    Args:
        stack: The stack of the table.
        server: Position of this server among those of the stack.
        seed: The seed of the collection.
        limit: The largest number of ids in a push.
    """

    def __init__(self, stack: Stack, server: int, seed: int, limit: int) -> None:
        super().__init__(stack, server, seed)
        self._member = stack.members[0]
        self._config = self._member.config
        assert self._config.dynamic is not None
        self._dynamic = self._config.dynamic
        self._seed = seed
        self._limit = limit
        self._clear()

    def _clear(self) -> None:
        capacity = len(self.rows_of(self._member))
        ttl = self._dynamic.ttl
        self._held = Roster(capacity, self._dynamic.evict, ttl, self._dynamic.min_frequency)
        self._waiting = Roster(capacity if self._dynamic.admit_after > 1 else 0, "age", ttl)

    def _begin(self, seed: int) -> None:
        """Leaves the rows as they are: each is set when an id gets it."""

    # Lookups

    def pull(self, rows: Tensor) -> Tensor:
        """Returns rows of ids: initial values where an id has no row.

        Raises:
            InputError: The ids are of another type or shape.
        """
        self._check(rows)
        places = torch.from_numpy(self._held.live(rows.numpy(), self._steps_made))
        found = take(self.weights, places.clamp(min=0))
        unknown = (places < 0).nonzero().view(-1)
        if len(unknown):
            found[unknown] = self._initial(rows[unknown])
        return found

    def changed_since(self, rows: Tensor, version: int) -> Tensor:
        """Returns which ids have rows that changed since, or none: they may have lost them."""
        self._check(rows)
        places = torch.from_numpy(self._held.live(rows.numpy(), self._steps_made))
        return (self.changed[places.clamp(min=0)] > version) | (places < 0)

    def pool(self, numbers: Tensor, bags: int, length: int, weights: Tensor | None) -> Tensor:
        """Refuses: trainers pool the rows of dynamic tables.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"server {self.name!r} was asked for sums of {self._tables()}, whose ids are dynamic; "
            "ask for rows",
            **self._named,
        )

    @property
    def _steps_made(self) -> int:
        return int(self.steps[0])

    def _initial(self, ids: Tensor) -> Tensor:
        return initial.values_of_ids(self._config, ids, self._member.columns, self._seed)

    # Steps

    def check(self, gradients: Gradients) -> None:
        """Checks gradients, before they count as part of a step.

        Raises:
            CapacityError: There are more ids than a push may have.
            InputError: The gradients do not fit the ids or the stack.
        """
        if any(len(part) > _VALUE_PARTS for part in gradients.parts):
            raise InputError(
                f"server {self.name!r} was sent gradients of bags of {self._tables()}, whose ids "
                "are dynamic; send those of rows",
                **self._named,
            )
        super().check(gradients)
        count = sum(len(part[0]) for part in gradients.parts)
        if count > self._limit:
            raise beyond_capacity(self._config.name, self.name, count, self._limit)

    def _check(self, rows: Tensor) -> None:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise InputError(
                f"server {self.name!r} was sent ids of {self._tables()} of {rows.dtype} with "
                f"{rows.dim()} dimensions; send torch.int64 with one",
                **self._named,
            )

    def _admitted(self, parts: Sequence[Part]) -> Sequence[Part]:
        if not parts:
            return parts
        ids = np.unique(np.concatenate([part[0].numpy() for part in parts]))
        self._note(ids)
        found = []
        for rows, values in parts:
            is_held = torch.from_numpy(self._held.find(rows.numpy()) >= 0)
            found.append((rows[is_held], values[is_held]))
        return found

    def _note(self, ids: Ints) -> None:
        """Counts ids, rising, that occur in this step; admits those that are due."""
        step = self._steps_made
        for roster in (self._held, self._waiting):
            roster.sweep(step - 1, ids)
        places = self._held.find(ids)
        is_held = places >= 0
        self._held.touch(places[is_held], step)
        new, counts, firsts = self._due(ids[~is_held], step)
        if len(new):
            # A row is reused, so nothing of its former id may remain.
            rows = torch.from_numpy(self._held.add(new, counts, firsts, step))
            weights = self._initial(torch.from_numpy(new))
            assert self._rule is not None
            for name, values in self._rule.state_for(weights).items():
                put(self.state[name], rows, values)
            put(self.weights, rows, weights)

    def _due(self, ids: Ints, step: int) -> tuple[Ints, Ints, Ints]:
        """Counts ids without rows.

        Returns:
            Those that have occurred often enough, their counts, and the first steps of theirs.
        """
        places = self._waiting.find(ids)
        is_known = places >= 0
        counts, firsts = np.ones(len(ids), np.int64), np.full(len(ids), step)
        counts[is_known] += self._waiting.counts[places[is_known]]
        firsts[is_known] = self._waiting.firsts[places[is_known]]
        is_due = counts >= self._dynamic.admit_after
        self._waiting.remove(places[is_known & is_due])
        self._waiting.touch(places[is_known & ~is_due], step)
        others = ~is_known & ~is_due
        if others.any():
            self._waiting.add(ids[others], counts[others], firsts[others], step)
        return ids[is_due], counts[is_due], firsts[is_due]

    def _change(
        self, rows: Tensor, gradients: Tensor, lr: float, step: Tensor, version: int
    ) -> None:
        places = torch.from_numpy(self._held.find(rows.numpy()))
        super()._change(places, gradients, lr, step, version)

    # Ids and rows

    @property
    def used_rows(self) -> int:
        """Rows that ids have, those of expired ids included until a step has looked at them."""
        return len(self._held)

    def occupancy(self) -> Occupancy:
        """Returns how many ids there are."""
        held, waiting = self._held, self._waiting
        rows, ids = (len(each.held(self._steps_made)) for each in (held, waiting))
        # Expired ids are gone, although they may still have places.
        evicted, dropped = held.evicted + len(held) - rows, waiting.evicted + len(waiting) - ids
        return Occupancy(rows, held.capacity, ids, held.added, evicted, dropped)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the ids that have rows, rising, and of these rows."""
        places = self._held.held(self._steps_made)
        return torch.from_numpy(self._held.ids[places]), take(
            self.weights, torch.from_numpy(places)
        )

    def copied(self, number: int) -> dict[str, Tensor]:
        """Returns copies of all ids, rows and state, in the order of ids."""
        return self._copies(*self._places())

    def copied_since(self, number: int, version: int, steps: float) -> dict[str, Tensor]:
        """Returns those of ids that changed since, and all ids: the others are gone."""
        held, waiting = self._places()
        return {
            f"{ALL}{ROWS}ids": torch.from_numpy(self._held.ids[held]),
            f"{ALL}{WAITING}ids": torch.from_numpy(self._waiting.ids[waiting]),
            **self._copies(
                held[self.changed.numpy()[held] > version],
                waiting[self._waiting.ages[waiting] > steps],
            ),
        }

    def _places(self) -> tuple[Ints, Ints]:
        return self._held.held(self._steps_made), self._waiting.held(self._steps_made)

    def _copies(self, held: Ints, waiting: Ints) -> dict[str, Tensor]:
        places = torch.from_numpy(held)
        found = {**_described(ROWS, self._held, held), f"{ROWS}weights": take(self.weights, places)}
        for name, values in self.state.items():
            found[f"{ROWS}state.{name}"] = take(values, places)
        return {**found, **_described(WAITING, self._waiting, waiting)}

    def replace(self, content: Mapping[str, Tensor], steps: float) -> None:
        """Sets ids, rows and state: those of a snapshot that belong on this server."""
        self._clear()
        self.steps.fill_(steps)
        chosen, places = (
            torch.from_numpy(each) for each in self._held.fill(*_parts(ROWS, content))
        )
        put(self.weights, places, take(content[f"{ROWS}weights"], chosen))
        for name, values in self.state.items():
            put(values, places, take(content[f"{ROWS}state.{name}"], chosen))
        self._waiting.fill(*_parts(WAITING, content))


def capacity_limit(stack: Stack, server: int, trainers: int) -> int:
    """Returns how many ids one push may have, so that those of all trainers have rows.

    Args:
        stack: The stack of a dynamic table.
        server: Position of the server among those of the stack.
        trainers: Number of pushes in a step.
    """
    return len(stack.members[0].rows_on(server, stack.stripes)) // trainers


def beyond_capacity(table: str, server: str, count: int, limit: int) -> CapacityError:
    """Returns the error of a step with too many ids of a dynamic table."""
    return CapacityError(
        f"a step has {count} ids of table {table!r} on {server!r}, and a trainer may push {limit} "
        "there in one step; make the table with more rows, or the batch smaller",
        table=table,
        server=server,
        count=count,
        limit=limit,
    )


def check_capacity(
    layout: Layout,
    pushes: Mapping[str, Mapping[int, tuple[int, Sequence[Part]]]],
    trainers: int,
) -> None:
    """Checks that the servers have rows for the dynamic ids of a trainer's step.

    Args:
        layout: The stacks.
        pushes: By server and stack: the members that were looked up, and gradients.
        trainers: Number of pushes in a step.

    Raises:
        CapacityError: A server has too few for a table.
    """
    for server, by_stack in pushes.items():
        for number, (_, parts) in by_stack.items():
            stack = layout.stacks[number]
            if stack.is_dynamic:
                count = sum(len(part[0]) for part in parts)
                limit = capacity_limit(stack, stack.servers.index(server), trainers)
                if count > limit:
                    raise beyond_capacity(stack.members[0].config.name, server, count, limit)


def overlaid(content: Mapping[str, Tensor], newer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns ids, rows and state with the changes of an increment."""
    found = {}
    for prefix in (ROWS, WAITING):
        ids, changed = content[f"{prefix}ids"], newer[f"{prefix}ids"]
        stays = torch.isin(ids, newer[f"{ALL}{prefix}ids"]) & ~torch.isin(ids, changed)
        for name, values in newer.items():
            if name.startswith(prefix):
                found[name] = torch.cat([content[name][stays], values])
    return found


def _described(prefix: str, roster: Roster, places: Ints) -> dict[str, Tensor]:
    return {prefix + name: torch.from_numpy(getattr(roster, name)[places]) for name in _MARKS}


def _parts(prefix: str, content: Mapping[str, Tensor]) -> tuple[Ints, Ints, Ints, Ints]:
    ids, counts, ages, firsts = (content[prefix + name].numpy() for name in _MARKS)
    return ids, counts, ages, firsts
