"""One server's part of a dynamic table: rows of any ids, which come and go with the steps.

Rules of the file: ids have places, counts and age marks; their number is bounded, and the oldest or
rarest give way. Ids also *expire*, while there is room. That follows from their marks and the
number of steps alone: an expired id is gone, whether its place has been taken from it or not. Each
step looks at a few places for that, and all of them when there is no room. So what is found never
depends on places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchweft.embedding import initial
from torchweft.embedding.configs import Evict
from torchweft.embedding.errors import CapacityError
from torchweft.embedding.initial import mixed, shifted
from torchweft.embedding.layout import Layout, Stack
from torchweft.embedding.rows import Part, put, take
from torchweft.embedding.shard import Gradients, Shard
from torchweft.extending import rebuilds_plain

Ints = NDArray[np.int64]
_EMPTY: Final = -1
_REMOVED: Final = -2
_SMALLEST: Final = 16


class IdMap:
    """A map from ids, any int64, to places, at least 0; not thread-safe."""

    def __init__(self) -> None:
        self._build(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, ids: Ints) -> Ints:
        """Returns the place of each id; -1 for those that are not in the map."""
        positions = self._positions(ids)
        return np.where(positions < 0, -1, self._places[positions])

    def insert(self, ids: Ints, places: Ints) -> None:
        """Inserts ids, each once, which are not in the map, with different places."""
        # At most half of the positions are in use, so that probes are short.
        if 2 * (self._used + len(ids)) > len(self._ids):
            self._grow(len(ids))
        self._put(ids, places)
        self._count += len(ids)
        self._used += len(ids)

    def remove(self, ids: Ints) -> None:
        """Removes ids, each once, which are in the map."""
        self._places[self._positions(ids)] = _REMOVED
        self._count -= len(ids)

    def _build(self, size: int) -> None:
        self._ids = np.zeros(size, np.int64)
        self._places = np.full(size, _EMPTY, np.int64)
        self._count = self._used = 0

    def _grow(self, more: int) -> None:
        """Builds the map anew, with room for more ids than it is asked for."""
        held = self._places >= 0
        ids, places = self._ids[held], self._places[held]
        needed = 3 * (len(ids) + more)
        self._build(max(_SMALLEST, 1 << (needed - 1).bit_length()))
        self._put(ids, places)
        self._count = self._used = len(ids)

    def _homes(self, ids: Ints) -> Ints:
        """Returns the first position of each id."""
        return mixed(torch.from_numpy(ids)).numpy() & (len(self._ids) - 1)

    def _positions(self, ids: Ints) -> Ints:
        found = np.full(len(ids), -1, np.int64)
        numbers, at = np.arange(len(ids)), self._homes(ids)
        while len(numbers):
            places = self._places[at]
            is_found = (places >= 0) & (self._ids[at] == ids[numbers])
            found[numbers[is_found]] = at[is_found]
            goes_on = ~is_found & (places != _EMPTY)
            numbers, at = numbers[goes_on], self._next(at[goes_on])
        return found

    def _put(self, ids: Ints, places: Ints) -> None:
        at = self._homes(ids)
        while len(ids):
            is_free = self._places[at] < 0
            # Of several ids at a free position, numpy keeps the place of the last.
            self._places[at[is_free]] = places[is_free]
            has_won = self._places[at] == places
            self._ids[at[has_won]] = ids[has_won]
            goes_on = ~has_won
            ids, places, at = ids[goes_on], places[goes_on], self._next(at[goes_on])

    def _next(self, positions: Ints) -> Ints:
        return (positions + 1) & (len(self._ids) - 1)


_SHARE: Final = 64
"""A full roster evicts at least this part of its capacity at once."""


class Roster:
    """Ids that have places, from 0 to ``capacity - 1``; not thread-safe.

    Args:
        capacity: The largest number of ids.
        evict: Which ids give way first.
        ttl: An id expires when it has not occurred in so many steps; None for never.
        min_frequency: An id expires when it has occurred in a smaller share of the steps since it
            first did.
    """

    def __init__(
        self, capacity: int, evict: Evict, ttl: int | None = None, min_frequency: float = 0.0
    ) -> None:
        self.capacity = capacity
        self._ttl = ttl
        self._min_frequency = min_frequency
        self.ids = np.zeros(capacity, np.int64)
        """The id of each place."""
        self.counts = np.zeros(capacity, np.int64)
        """In how many steps the id of each place has occurred."""
        self.ages = np.zeros(capacity, np.int64)
        """The last step in which the id of each place has occurred."""
        self.firsts = np.zeros(capacity, np.int64)
        """The first step in which the id of each place has occurred."""
        self.added = 0
        """How many ids were added."""
        self.evicted = 0
        """How many ids have given way to others, or have expired and been removed."""
        self._evict = evict
        self._is_held = np.zeros(capacity, np.bool_)
        self._map = IdMap()
        self._freed = np.zeros(0, np.int64)
        self._end = 0  # places from here were never used

    def __len__(self) -> int:
        return len(self._map)

    def find(self, ids: Ints) -> Ints:
        """Returns the place of each id; -1 for those that have none."""
        return self._map.find(ids)

    def live(self, ids: Ints, steps: int) -> Ints:
        """Returns the place of each id; -1 for those that have none, or have expired.

        Args:
            ids: The ids.
            steps: How many steps there have been.
        """
        places = self.find(ids)
        if self._expires:
            held = np.flatnonzero(places >= 0)
            places[held[self._is_expired(places[held], steps)]] = -1
        return places

    def held(self, steps: int) -> Ints:
        """Returns the places of all ids that have not expired, in the order of ids."""
        places = np.flatnonzero(self._is_held)
        if self._expires:
            places = places[~self._is_expired(places, steps)]
        return places[np.argsort(self.ids[places])]

    @property
    def _expires(self) -> bool:
        return self._ttl is not None or self._min_frequency > 0

    def _is_expired(self, places: Ints, steps: int) -> NDArray[np.bool_]:
        found = self.counts[places] < self._min_frequency * (steps + 1 - self.firsts[places])
        if self._ttl is not None:
            found |= self.ages[places] <= steps - self._ttl
        return found

    def sweep(self, steps: int, ids: Ints) -> None:
        """Takes the places from those of some ids that have expired after so many steps."""
        if self._expires:
            places = self.find(ids)
            self._expire(places[places >= 0], steps)

    def _expire(self, places: Ints, steps: int) -> None:
        gone = places[self._is_expired(places, steps)]
        if len(gone):
            self.remove(gone)
            self.evicted += len(gone)

    def touch(self, places: Ints, step: int) -> None:
        """Notes that ids, each once, have occurred in a step."""
        self.counts[places] += 1
        self.ages[places] = step

    def add(self, ids: Ints, counts: Ints, firsts: Ints, step: int) -> Ints:
        """Gives places to ids, each once, that have none; returns these places.

        Others give way if there is no room, but none that has occurred in this step. So at most
        ``capacity`` ids occur in one.
        """
        if len(self) + len(ids) > self.capacity:
            self._make_room(len(ids), step)
        self.added += len(ids)
        return self._set(ids, counts, np.full(len(ids), step), firsts)

    def remove(self, places: Ints) -> None:
        """Takes places, each once, from their ids."""
        self._map.remove(self.ids[places])
        self._is_held[places] = False
        self._freed = np.concatenate([places, self._freed])

    def fill(self, ids: Ints, counts: Ints, ages: Ints, firsts: Ints) -> tuple[Ints, Ints]:
        """Takes over ids, each once, while there are none here; not those that are too many.

        Returns:
            Which of the ids were taken over, rising; and their places.
        """
        chosen = np.arange(len(ids))
        if len(ids) > self.capacity:
            gone = first_to_go(ids, counts, ages, len(ids) - self.capacity, self._evict)
            chosen = np.delete(chosen, gone)
        return chosen, self._set(ids[chosen], counts[chosen], ages[chosen], firsts[chosen])

    def _set(self, ids: Ints, counts: Ints, ages: Ints, firsts: Ints) -> Ints:
        new = max(0, len(ids) - len(self._freed))
        places = np.concatenate([self._freed[: len(ids)], np.arange(self._end, self._end + new)])
        self._freed = self._freed[len(ids) :]
        self._end += new
        self.ids[places], self.counts[places] = ids, counts
        self.ages[places], self.firsts[places] = ages, firsts
        self._is_held[places] = True
        self._map.insert(ids, places)
        return places

    def _make_room(self, wanted: int, step: int) -> None:
        if self._expires:
            self._expire(np.flatnonzero(self._is_held & (self.ages != step)), step - 1)
        lacking = len(self) + wanted - self.capacity
        if lacking <= 0:
            return
        others = np.flatnonzero(self._is_held & (self.ages != step))
        number = min(len(others), max(lacking, self.capacity // _SHARE))
        parts = self.ids[others], self.counts[others], self.ages[others]
        self.remove(others[first_to_go(*parts, number, self._evict)])
        self.evicted += number


def first_to_go(ids: Ints, counts: Ints, ages: Ints, number: int, evict: Evict) -> Ints:
    """Returns the positions of those ids, a positive number of them, that give way first."""
    first, second = (ages, counts) if evict == "age" else (counts, ages)
    limit = np.partition(first, number - 1)[number - 1]
    near = np.flatnonzero(first <= limit)  # only these need be in order
    order = np.lexsort((ids[near], second[near], first[near]))
    return near[order[:number]]


ROWS: Final = "rows."
WAITING: Final = "waiting."
"""How the names of tensors begin in a snapshot: of ids with rows, and of those without."""
ALL: Final = "all."
"""How those of all ids begin in an increment, whose other tensors are of changed ones."""
_MARKS: Final = ("ids", "counts", "ages", "firsts")
_VALUE_PARTS: Final = 2
_SERVER_BITS: Final = 33


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
        raise self._refused(
            f"was asked for sums of {self._tables()}, whose ids are dynamic; ask for rows",
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
            raise self._refused(
                f"was sent gradients of bags of {self._tables()}, whose ids "
                "are dynamic; send those of rows",
            )
        super().check(gradients)
        count = sum(len(part[0]) for part in gradients.parts)
        if count > self._limit:
            raise beyond_capacity(self._config.name, self.name, count, self._limit)

    def _check(self, rows: Tensor) -> None:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise self._refused(
                f"was sent ids of {self._tables()} of {rows.dtype} with "
                f"{rows.dim()} dimensions; send torch.int64 with one",
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


def server_of(ids: Tensor, servers: int) -> Tensor:
    """Returns which of some servers has each id of a dynamic table.

    Snapshots and servers of several versions rely on it: it does not change.
    """
    found: Tensor = shifted(mixed(ids), _SERVER_BITS).remainder_(servers)
    return found


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
