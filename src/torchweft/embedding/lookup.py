"""The lookups of a worker: from ids to outputs, now or some batches ahead.

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
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchweft.arguments import check_type, did_you_mean, kind_of
from torchweft.closing import Closing
from torchweft.embedding.cache import Cache, RowCache
from torchweft.embedding.client import Client, wait_for
from torchweft.embedding.configs import TableConfig
from torchweft.embedding.errors import BadIds
from torchweft.embedding.inputs import Checker, Flat
from torchweft.embedding.planner import Plan
from torchweft.embedding.requests import (
    Ages,
    CachedRequest,
    StackRequest,
    TableIds,
    Traffic,
    make_router,
    prepare,
)
from torchweft.embedding.rows import Form, Wire, decode
from torchweft.embedding.server import ROW_PARTS, shown_staleness
from torchweft.errors import ConfigurationError
from torchweft.extending import tell_numbers
from torchweft.reports import NumberRow, NumberTable
from torchweft.rpc import Future

B = TypeVar("B")
"""A batch of the program."""
Flats = Mapping[str, Flat]
"""The checked ids of one lookup, by table."""
Answers = Mapping[str, tuple[int, list[Any]]]
"""By server, its version and what was asked of it."""
Copied = Callable[[TableConfig, Flat], Tensor]
"""Looks up a table that this worker has a copy of."""


@dataclass
class Lookup:
    """One lookup; its outputs are taken once, when its rows are here.

    Attributes:
        reader: Makes the outputs.
        flats: The ids.
        requests: What it requests of each stack.
        step: The step of the trainer in which its rows are valid; -1 before they are here.
    """

    reader: Reader
    flats: Flats
    requests: list[StackRequest]
    step: int = -1

    @property
    def is_valid(self) -> bool:
        """Whether the trainer is still in the step for which the rows were pulled."""
        return self.reader.is_in(self.step)

    def outputs(self) -> dict[str, Tensor]:
        """Returns the output of each table."""
        return self.reader.outputs(self.flats, self.requests)


class Pull:
    """What lookups request of all stacks, by one message to each server.

    Args:
        reader: Has begun the lookups.
        lookups: The lookups.

    Attributes:
        parts: The requests of all lookups.
        messages: What to ask of each server.
        places: By part and server, which item of the message is of the part.
        futures: The answers by server, if the pull was sent before it is needed.
    """

    def __init__(self, reader: Reader, lookups: Sequence[Lookup]) -> None:
        self.parts = [each for lookup in lookups for each in lookup.requests]
        self.messages: dict[str, list[Any]] = {}
        self.places: list[dict[str, int]] = []
        self.futures: Mapping[str, Future[Any]] = {}
        self._reader = reader
        self._lookups = lookups
        for part in self.parts:
            self.places.append({})
            for server, item in part.requests().items():
                message = self.messages.setdefault(server, [])
                self.places[-1][server] = len(message)
                message.append(item)

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        for part in self.parts:
            part.get_ready()

    def arrive(self, answers: Answers, form: Form | None, step: int) -> None:
        """Gives each part what is of it.

        Args:
            answers: By server, its version and what was asked of it.
            form: The form of the values.
            step: The step of the trainer.
        """
        for part, places in zip(self.parts, self.places, strict=True):
            versions = {server: answers[server][0] for server in places}
            values = {
                server: decode(answers[server][1][place], form, part.stack.dtype)
                for server, place in places.items()
            }
            part.arrive(versions, values, step)
        for lookup in self._lookups:
            lookup.step = step

    def received(self) -> Sequence[Lookup]:
        """Waits for the rows of a pull that was sent, and returns its lookups."""
        self._reader.settle_sent(self, wait_for(self.futures))
        return self._lookups

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and returns the output of each table of the only lookup."""
        (lookup,) = self.received()
        return lookup.outputs()

    def cancel(self) -> None:
        """Ends a pull that was sent, and gives up the rows that a cache holds for it."""
        for future in self.futures.values():
            future.cancel()
        self.abandon()

    def abandon(self) -> None:
        """Gives up the rows that a cache holds for the lookups, unless they were taken."""
        for part in self.parts:
            if isinstance(part, CachedRequest):
                part.abandon()


class Reader:
    """Looks up rows of a collection for one worker; not thread-safe.

    Args:
        client: Calls the servers.
        plan: The tables and where they are.
        wire: The form of values in messages.
        cache: Which rows to keep, or None.
        copied: Looks up copies.
        before: The reader of a former layout of the same tables, whose work this one goes on with.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        wire: Wire,
        cache: Cache | None,
        copied: Copied,
        before: Reader | None = None,
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
        self._caches = [
            RowCache.of_stack(cache, stack) for stack in plan.layout.stacks if cache is not None
        ]
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
        (lookup,) = self.pull([self.flats(inputs)])
        return lookup.outputs()

    def pull(self, each: Sequence[Flats]) -> list[Lookup]:
        """Pulls the rows of several lookups, with one call to each server. Blocks.

        Their gradients stay apart: only those of lookups whose outputs are used are pushed.

        Args:
            each: What ``flats`` returns for each lookup.
        """
        lookups = [self._begun(flats, self._ages()) for flats in each]
        pull = Pull(self, lookups)
        try:
            # With a cache, little is left to do until the rows are here.
            meanwhile = None if self._caches else pull.get_ready
            self._settle(pull, self._client.pull(pull.messages, meanwhile))
        finally:
            pull.abandon()
        return lookups

    def send(self, each: Sequence[Flats], waiting: int) -> Pull:
        """Sends the pull of several lookups that are used later.

        Args:
            each: What ``flats`` returns for each lookup.
            waiting: How many lookups that were sent are used before.
        """
        ages = self._ages(waiting)
        pull = Pull(self, [self._begun(flats, ages, is_ahead=True) for flats in each])
        try:
            pull.futures = self._client.start_pull(pull.messages)
        except BaseException:
            pull.abandon()
            raise
        if not self._caches:
            pull.get_ready()
        return pull

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

    def _begun(self, flats: Flats, ages: Ages, *, is_ahead: bool = False) -> Lookup:
        """Returns a lookup; a cache holds its rows until they are taken or abandoned."""
        lookup = Lookup(self, flats, [])
        for number, router in enumerate(self._routers):
            tables = [
                TableIds(place, member, flats[member.config.name])
                for place, member in enumerate(router.stack.members)
                if member.config.name in flats
            ]
            if tables and self._caches:
                cache = self._caches[number]
                own = CachedRequest(number, router, tables, cache, ages, may_wait=is_ahead)
                lookup.requests.append(own)
            elif tables:
                lookup.requests += prepare(number, router, tables)
        return lookup

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
        pull.arrive(answers, self._form, client.step)
        ages = self._ages()
        late: list[StackRequest] = [
            part for part in pull.parts if isinstance(part, CachedRequest) and part.is_late(ages)
        ]
        if late:
            again = Pull(self, [Lookup(self, {}, late)])
            again.arrive(client.pull(again.messages), self._form, client.step)
        oldest: dict[str, int] = {}
        for part in pull.parts:
            if isinstance(part, CachedRequest):
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

    def settle_sent(self, pull: Pull, answers: Mapping[str, Any]) -> None:
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
                for each in pull.messages[server]
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
                    pull.messages[server], answers[server][1], news, strict=True
                )
            ]
            found[server] = version, values
        return found

    def clear_cache(self) -> None:
        """Drops all rows that were kept."""
        for cache in self._caches:
            cache.clear()

    # Outputs

    def outputs(self, flats: Flats, requests: Sequence[StackRequest]) -> dict[str, Tensor]:
        """Returns the output of each table, from values that are here."""
        columns: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in flats}
        for request in requests:
            request.place = next(self._places)
            for member, output in request.outputs(request.take_leaf(self._touch)):
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

    def _touch(self, pulled: StackRequest) -> None:
        leaf = pulled.leaf()
        if leaf is not None and not pulled.is_noted:
            pulled.is_noted = True
            self.touched.append(leaf)

    def is_in(self, step: int) -> bool:
        """Whether the trainer is in a step; not after a re-sharding, which closes the client."""
        return self._client.is_open and self._client.step == step

    # Figures

    def note_pushed(self, pulled: Iterable[StackRequest], versions: Mapping[str, int]) -> None:
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

    def _note(self, pulled: StackRequest, staleness: int) -> None:
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


def _told(find: Callable[[], Reader | None]) -> NumberTable:
    found = find()
    rows = [] if found is None else found.told()
    return NumberTable("embedding lookups", ("collection", "table"), tuple(rows))


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
class _Waiting(Generic[B]):
    batch: B
    lookup: Any
    """A ``Pull``, or what has its ``outputs`` and ``cancel``."""


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
                first = self._waiting[0]
                outputs = first.lookup.outputs()
                self._waiting.popleft()
                return first.batch, outputs
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
