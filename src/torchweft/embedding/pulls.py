"""The pulls of a worker: lookups from ids to outputs, now or some batches ahead.

A pull is one message to each server for all stacks of a lookup, or of several lookups. Rows that
were pulled ahead are asked for again where they are too old for the step that uses them.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.arguments import check_type, did_you_mean, kind_of
from torchweft.closing import Closing
from torchweft.embedding.cache import Ages, Cache, CachedRows, cache_of
from torchweft.embedding.client import Client, wait_for
from torchweft.embedding.configs import TableConfig
from torchweft.embedding.errors import BadIds
from torchweft.embedding.inputs import Checker, Flat
from torchweft.embedding.lookup import Answer, Looked, Pulled, Traffic, make_router, prepare
from torchweft.embedding.planner import Plan
from torchweft.embedding.rows import Form, Wire, decode
from torchweft.embedding.server import ROW_PARTS, shown_staleness
from torchweft.errors import ConfigurationError
from torchweft.extending import NumberRow, NumberTable, tell_numbers
from torchweft.rpc import Future

B = TypeVar("B")
"""A batch of the program."""
Flats = Mapping[str, Flat]
"""The checked ids of one lookup, by table."""
Copied = Callable[[TableConfig, Flat], Tensor]
"""Looks up a table that this worker has a copy of."""


class Pull:
    """What several lookups pull, of all stacks.

    Args:
        lookups: By lookup, what it pulls of each stack.
        form: The form of the values in messages.
    """

    def __init__(self, lookups: Sequence[Sequence[Pulled]], form: Form | None) -> None:
        self.lookups = lookups
        self.parts = [part for parts in lookups for part in parts]
        self.requests: dict[str, list[Any]] = {}
        """What to ask of each server."""
        self.places: list[dict[str, int]] = []
        """By part and server, which of the requests to the server is of the part."""
        self._form = form
        for part in self.parts:
            self.places.append({})
            for server, request in part.requests().items():
                of_server = self.requests.setdefault(server, [])
                self.places[-1][server] = len(of_server)
                of_server.append(request)

    def arrive(self, answers: Mapping[str, tuple[int, list[Any]]], step: int) -> None:
        """Gives each part what is of it.

        Args:
            answers: By server, its version and what was asked of it.
            step: The step of the trainer.
        """
        for part, places in zip(self.parts, self.places, strict=True):
            versions = {server: answers[server][0] for server in places}
            values = {
                server: decode(answers[server][1][place], self._form, part.stack.dtype)
                for server, place in places.items()
            }
            part.arrive(Answer(versions, values), step)


class Lookups:
    """The lookups of one worker in a collection; not thread-safe.

    Args:
        client: Calls the servers.
        plan: The tables and where they are.
        wire: The form of values in messages.
        cache: Which rows to keep, or None.
        copied: Looks up copies.
        before: The lookups of a former layout of the same tables, from which these go on.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        wire: Wire,
        cache: Cache | None,
        copied: Copied,
        before: Lookups | None = None,
    ) -> None:
        self._client = client
        self._form = wire.pulled
        self._cache = cache
        self._copied = copied
        self._checkers = {
            each.name: Checker(each, plan.placed[each.name].shards) for each in plan.configs
        }
        self._copies = {each.name for each in plan.copied}
        self._routers = [make_router(stack, wire) for stack in plan.layout.stacks]
        self._caches = [] if cache is None else [cache_of(cache, each) for each in self._routers]
        self._places = itertools.count()
        self._traffic = {each.name: Traffic() for each in plan.configs}
        self.is_trained = False
        """Whether this worker steps the rows, so that those that it has grow old."""
        self.touched: list[Tensor] = []
        """The leaves that have a gradient."""
        if before is not None:
            self._traffic, self.touched = before._traffic, before.touched
            self.is_trained = before.is_trained
        self.forget = weakref.finalize(
            self, tell_numbers(functools.partial(_told, weakref.ref(self)))
        )
        """Ends what this worker tells observers of the lookups."""

    def look_up(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the output of each table; blocks."""
        (drawn,) = self.look_up_each([self.flats(inputs)])
        return drawn.outputs()

    def look_up_each(self, each: Sequence[Flats]) -> list[Drawn]:
        """Pulls the rows of several lookups, with one call to each server. Blocks.

        Their gradients stay apart: only those of lookups whose outputs are used are pushed.

        Args:
            each: What ``flats`` returns for each lookup.
        """
        pull = self._reserved(each)
        try:
            # With a cache, little is left to do until the rows are here.
            meanwhile = functools.partial(_get_ready, pull) if self._cache is None else None
            self._settle(pull, self._client.pull(pull.requests, meanwhile))
        finally:
            _abandon(pull)
        return self._drawn(each, pull)

    def send(self, inputs: Mapping[str, Any], waiting: int) -> Sent:
        """Sends the pull of a lookup that is used later.

        Args:
            inputs: What to look up.
            waiting: How many lookups that were sent are used before.
        """
        return self.send_each([self.flats(inputs)], waiting)

    def send_each(self, each: Sequence[Flats], waiting: int) -> Sent:
        """Sends the pull of several lookups that are used later; see ``send``."""
        pull = self._reserved(each, waiting)
        try:
            futures = self._client.start_pull(pull.requests)
        except BaseException:
            _abandon(pull)
            raise
        if self._cache is None:
            _get_ready(pull)
        return Sent(self, each, pull, futures)

    # Inputs

    def checker(self, name: str) -> Checker:
        """Returns what checks the inputs of a table.

        Raises:
            BadIds: There is no such table.
        """
        checker = self._checkers.get(name)
        if checker is None:
            hint = did_you_mean(str(name), list(self._checkers))
            raise BadIds(f"there is no table {name!r} to look up{hint}", table=str(name))
        return checker

    def flats(self, inputs: Mapping[str, Any]) -> dict[str, Flat]:
        """Returns the checked ids of a lookup.

        Raises:
            InputError: They cannot be looked up.
        """
        if not isinstance(inputs, Mapping):
            tables = ", ".join(map(repr, self._checkers))
            raise BadIds(
                f"inputs is {kind_of(inputs)}; pass a dict with the ids of each table to look up, "
                f"by name; there are {tables}"
            )
        return {name: self.checker(name).flat(value) for name, value in inputs.items()}

    def _reserved(self, each: Sequence[Flats], waiting: int | None = None) -> Pull:
        """Returns what to pull; a cache holds its rows until they are taken or abandoned."""
        ages = self._ages(waiting or 0)
        lookups: list[list[Pulled]] = []
        for flats in each:
            lookups.append([])
            for number, router in enumerate(self._routers):
                looked = [
                    Looked(place, member, flats[member.config.name])
                    for place, member in enumerate(router.stack.members)
                    if member.config.name in flats
                ]
                if looked and self._cache is not None:
                    cache, is_ahead = self._caches[number], waiting is not None
                    own = CachedRows(number, router, looked, cache, ages, may_wait=is_ahead)
                    lookups[-1].append(own)
                elif looked:
                    lookups[-1] += prepare(number, router, looked)
        return Pull(lookups, self._form)

    def _ages(self, waiting: int = 0) -> Ages:
        """Returns the ages of rows that are used after some lookups have been used."""
        bound = self._client.staleness
        if bound is None:
            bound = (self._cache and self._cache.steps) or 0
        used = self._client.step + (waiting if self.is_trained else 0)
        return Ages(used - bound, self._client.step, self._client.staleness is None)

    # Values

    def _settle(self, pull: Pull, answers: Mapping[str, Any]) -> None:
        """Takes answers over; pulls those rows of a cache again that are too old."""
        client = self._client
        pull.arrive(answers, client.step)
        ages = self._ages()
        late = [part for part in pull.parts if isinstance(part, CachedRows) and part.is_late(ages)]
        if late:
            again = Pull([late], self._form)
            again.arrive(client.pull(again.requests), client.step)
        oldest: dict[str, int] = {}
        for part in pull.parts:
            if isinstance(part, CachedRows):
                for server, version in part.take(client.step).items():
                    oldest[server] = min(version, oldest.get(server, version))
            for table, moved in part.moved.items():
                traffic = self._traffic[table]
                traffic.ids += moved.ids
                traffic.rows += moved.rows
                traffic.hits += moved.hits
                traffic.pulled_bytes += moved.pulled_bytes
            if client.is_bounded:
                self._note(part, client.step - part.version)
        self._note_uncounted(oldest)

    def settle_ahead(self, pull: Pull, answers: Mapping[str, Any]) -> None:
        """Takes the answers of a pull over that was sent ahead, as they would be now."""
        client = self._client
        if self._cache is None and client.is_bounded:
            versions = {server: version for server, (version, _) in answers.items()}
            oldest = client.step - (client.staleness or 0)
            old = {server: each for server, each in versions.items() if each < oldest}
            self._note_uncounted({each: versions[each] for each in versions.keys() - old.keys()})
            if old:
                answers = {**answers, **self._refreshed(pull, answers, old)}
        self._settle(pull, answers)

    def _note_uncounted(self, versions: Mapping[str, int]) -> None:
        """Counts the staleness of rows of some servers that no counted pull has returned."""
        if self._client.is_bounded:
            for server, version in versions.items():
                self._client.note_staleness(server, self._client.step - version)

    def _refreshed(
        self, pull: Pull, answers: Mapping[str, Any], old: Mapping[str, int]
    ) -> dict[str, Any]:
        """Returns the answers of some servers as they would be now."""
        requests = {
            server: [
                (*each, version) if len(each) == ROW_PARTS else each
                for each in pull.requests[server]
            ]
            for server, version in old.items()
        }
        news_of = self._client.pull_again(requests)
        for part, places in zip(pull.parts, pull.places, strict=True):
            moved = [
                (requests[server][place], news_of[server][1][place])
                for server, place in places.items()
                if server in old
            ]
            self._traffic[next(iter(part.moved))].pulled_bytes += size_bytes(moved)
        found = {}
        for server, (version, news) in news_of.items():
            values = [
                replaced(before, *new) if len(each) == ROW_PARTS else new
                for each, before, new in zip(
                    pull.requests[server], answers[server][1], news, strict=True
                )
            ]
            found[server] = version, values
        return found

    def clear_cache(self) -> None:
        """Drops all rows that were kept."""
        for cache in self._caches:
            cache.clear()

    # Outputs

    def _drawn(self, each: Sequence[Flats], pull: Pull) -> list[Drawn]:
        return [
            Drawn(self, self._client.step, flats, parts)
            for flats, parts in zip(each, pull.lookups, strict=True)
        ]

    def outputs(self, flats: Flats, parts: Sequence[Pulled]) -> dict[str, Tensor]:
        """Returns the output of each table, from values that are here."""
        columns: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in flats}
        for pulled in parts:
            pulled.place = next(self._places)
            for member, output in pulled.outputs(pulled.take_leaf(self._touch)):
                columns[member.config.name].append((member.columns.start, output))
        return {name: self._output(name, flat, columns[name]) for name, flat in flats.items()}

    def _output(self, name: str, flat: Flat, parts: list[tuple[int, Tensor]]) -> Tensor:
        if name in self._copies:
            return self._copied(self._checkers[name].config, flat)
        columns = [output for _, output in sorted(parts, key=lambda part: part[0])]
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        if len(flat.shape) != 1:
            joined = joined.view(*flat.shape, joined.shape[1])
        return joined if flat.device == joined.device else joined.to(flat.device)

    def _touch(self, pulled: Pulled) -> None:
        leaf = pulled.leaf()
        if leaf is not None and not pulled.is_noted:
            pulled.is_noted = True
            self.touched.append(leaf)

    def is_in(self, step: int) -> bool:
        """Whether the trainer is in a step; not after a re-sharding, which closes the client."""
        return self._client.is_open and self._client.step == step

    # Figures

    def note_pushed(self, pulled: Iterable[Pulled], versions: Mapping[str, int]) -> None:
        """Counts the bytes of a push, and in the asynchronous mode its staleness.

        Args:
            pulled: The lookups whose gradients were pushed.
            versions: The version of each server after the push.
        """
        for each in pulled:
            for table, moved in each.moved.items():
                self._traffic[table].pushed_bytes += moved.pushed_bytes
            if self._client.staleness is None:
                # The push itself is one of those that were applied.
                ages = [
                    versions[server] - 1 - each.versions.get(server, each.version)
                    for server in each.versions or each.stack.servers
                    if server in versions
                ]
                self._note(each, max(ages, default=0))

    def _note(self, pulled: Pulled, staleness: int) -> None:
        for name in pulled.moved:
            self._traffic[name].note_staleness(staleness)

    def traffic(self) -> dict[str, Traffic]:
        """Returns what lookups and pushes have moved, by table."""
        return {
            name: replace(traffic, staleness=traffic.staleness.copy())
            for name, traffic in self._traffic.items()
        }

    def told(self) -> list[NumberRow]:
        """Returns what observers see of these lookups: a row for each table."""
        rows = []
        for table, moved in self.traffic().items():
            numbers = {
                "ids": float(moved.ids),
                "rows": float(moved.rows),
                "unique share": moved.rows / moved.ids if moved.ids else math.nan,
                "hits share": moved.hits / moved.rows if moved.rows else math.nan,
                "pulled bytes": float(moved.pulled_bytes),
                "pushed bytes": float(moved.pushed_bytes),
            }
            known = {key: value for key, value in numbers.items() if not math.isnan(value)}
            labels = self._client.name, table
            rows.append(NumberRow(labels, known, shown_staleness(moved.staleness)))
        return rows


def _told(find: Callable[[], Lookups | None]) -> NumberTable:
    found = find()
    rows = [] if found is None else found.told()
    return NumberTable("embedding lookups", ("collection", "table"), tuple(rows))


def _get_ready(pull: Pull) -> None:
    for part in pull.parts:
        part.get_ready()


def _abandon(pull: Pull) -> None:
    for part in pull.parts:
        if isinstance(part, CachedRows):
            part.abandon()


def replaced(values: Any, places: Tensor, new: Any) -> Any:
    """Returns the rows of a message, in which some are replaced by those of another one."""
    if not len(places):
        return values
    if isinstance(values, Tensor):
        return values.index_copy(0, places.long(), new)
    return tuple(replaced(own, places, other) for own, other in zip(values, new, strict=True))


def size_bytes(message: Any) -> int:
    """Returns the size of the tensors of a message."""
    if isinstance(message, Tensor):
        return message.nbytes
    return sum(map(size_bytes, message)) if isinstance(message, (tuple, list)) else 0


@dataclass(frozen=True)
class Drawn:
    """A lookup whose rows are here, and not yet used.

    Attributes:
        step: The trainer's step in which the rows are valid.
    """

    lookups: Lookups
    step: int
    flats: Flats
    parts: Sequence[Pulled]

    @property
    def is_valid(self) -> bool:
        """Whether the trainer is still in the step for which the rows were pulled."""
        return self.lookups.is_in(self.step)

    def outputs(self) -> dict[str, Tensor]:
        """Returns the output of each table; once."""
        return self.lookups.outputs(self.flats, self.parts)


@dataclass(frozen=True)
class Sent:
    """Lookups of one pull that was sent before they are needed."""

    lookups: Lookups
    flats: Sequence[Flats]
    pull: Pull
    futures: Mapping[str, Future[Any]]

    def drawn(self) -> list[Drawn]:
        """Waits for the rows, and returns the lookups."""
        self.lookups.settle_ahead(self.pull, wait_for(self.futures))
        return self.lookups._drawn(self.flats, self.pull)

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and returns the output of each table of the only lookup."""
        (drawn,) = self.drawn()
        return drawn.outputs()

    def cancel(self) -> None:
        """Ends the pull, and gives up the rows that a cache holds for it."""
        for future in self.futures.values():
            future.cancel()
        _abandon(self.pull)


class _Waiting(NamedTuple, Generic[B]):
    batch: B
    lookup: Any
    """``Sent``, or what has its ``outputs`` and ``cancel``."""


class RowStream(Closing, Generic[B]):
    """Yields batches in order, each with the outputs of its lookups; see ``Tables.stream``.

    Also a context manager, which closes it. Not thread-safe.

    Args:
        batches: The batches.
        ahead: How many batches are pulled before they are needed.
        inputs: Returns the input of the tables for a batch.
        send: Sends the pull of a lookup, given how many that were sent are used before.
    """

    def __init__(
        self,
        batches: Iterable[B],
        ahead: int,
        inputs: Callable[[B], Mapping[str, Any]],
        send: Callable[[Mapping[str, Any], int], Any],
    ) -> None:
        if type(ahead) is not int or ahead < 0:
            raise ConfigurationError(f"ahead is {ahead!r}; pass a number of batches, at least 0")
        check_type(batches, Iterable, "batches", "the batches of the program, such as a list")
        self._batches = iter(batches)
        self._ahead = ahead
        self._inputs = inputs
        self._send = send
        self._waiting: deque[_Waiting[B]] = deque()
        self._is_closed = False

    def __iter__(self) -> Iterator[tuple[B, dict[str, Tensor]]]:
        return self

    def __next__(self) -> tuple[B, dict[str, Tensor]]:
        if self._is_closed:
            raise StopIteration
        try:
            self._fill()
            if self._waiting:
                batch, lookup = self._waiting[0]
                outputs = lookup.outputs()
                self._waiting.popleft()
                return batch, outputs
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def _fill(self) -> None:
        while len(self._waiting) <= self._ahead:
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            lookup = self._send(self._inputs(batch), len(self._waiting))
            self._waiting.append(_Waiting(batch, lookup))

    def close(self) -> None:
        """Cancels the pulls that are under way. The stream is at its end then."""
        self._is_closed = True
        while self._waiting:
            self._waiting.pop().lookup.cancel()
