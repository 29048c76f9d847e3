"""Looks up tables on servers: ids in, rows out as leaves, with a cache of rows if there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchweft.arguments import did_you_mean, kind_of
from torchweft.embedding.cache import Cache, RowCache
from torchweft.embedding.cached import Ages, CachedRows
from torchweft.embedding.calls import wait_for
from torchweft.embedding.client import Client
from torchweft.embedding.errors import BadIds
from torchweft.embedding.inputs import Checker, Flat
from torchweft.embedding.lookup import Fetch, prepare
from torchweft.embedding.plan import Plan, Stack, TableConfig
from torchweft.embedding.pulled import Looked, Pulled, Traffic
from torchweft.embedding.pulling import ROW_PARTS, Pulling, replaced, size_bytes
from torchweft.embedding.routing import Router, make_router
from torchweft.embedding.wire import Wire
from torchweft.rpc import Future

Found = list[tuple[Pulled, Tensor]]
Flats = Mapping[str, Flat]
"""What one lookup is of, by table."""
P = TypeVar("P")
Copied = Callable[[TableConfig, Flat], Tensor]
"""Looks up a table that this worker has a copy of."""


class Lookups:
    """The lookups of one worker in a collection; not thread-safe.

    Args:
        client: Calls the servers.
        plan: The tables and where they are.
        wire: The form of values in messages.
        cache: Which rows to keep, or None.
        copied: Looks up copies.
    """

    def __init__(
        self, client: Client, plan: Plan, wire: Wire, cache: Cache | None, copied: Copied
    ) -> None:
        self._client = client
        self._plan = plan
        self._form = wire.pulled
        self._cache = cache
        self._copied = copied
        self._checkers = {
            each.name: Checker(each, plan.placed[each.name].shards) for each in plan.configs
        }
        self._traffic = {each.name: Traffic() for each in plan.configs}
        self._routers = [make_router(stack, wire) for stack in plan.layout.stacks]
        self._caches = [] if cache is None else [_cache_of(cache, each) for each in self._routers]
        self._places = itertools.count()
        self.is_trained = False
        """Whether this worker steps the rows, so that those that it has grow old."""
        self.touched: list[Tensor] = []
        """The leaves that have a gradient."""

    def look_up(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the output of each table; blocks."""
        flats = self.flats(inputs)
        if self._cache is None:
            pulling = Pulling(self._prepared(flats), self._form)
            return self._outputs(flats, self._pulled(pulling))
        wanted = self._reserved(flats)
        try:
            rows = Pulling([each.fetch for each in wanted], self._form)
            ages = self._ages()
            return self._outputs(flats, self._settled(wanted, rows, self._pull(rows), ages))
        finally:
            for each in wanted:
                each.abandon()

    def look_up_each(self, each: Sequence[Flats]) -> list[Drawn]:
        """Pulls the rows of several lookups, with one call to each server. Blocks.

        Their gradients stay apart: only those of lookups whose outputs are used are pushed.

        Args:
            each: What ``flats`` returns for each lookup.
        """
        if self._cache is None:
            parts = [self._prepared(flats) for flats in each]
            pulling = Pulling(_joined(parts), self._form)
            return self._drawn(each, parts, self._pulled(pulling))
        wanted = self._reserved_each(each)
        try:
            rows = Pulling([part.fetch for part in _joined(wanted)], self._form)
            ages = self._ages()
            found = self._settled(_joined(wanted), rows, self._pull(rows), ages)
            return self._drawn(each, wanted, found)
        finally:
            for part in _joined(wanted):
                part.abandon()

    def send(self, inputs: Mapping[str, Any], waiting: int) -> Ahead | CachedAhead:
        """Sends the pull of a lookup that is used later.

        Args:
            inputs: What to look up.
            waiting: How many lookups that were sent are used before.
        """
        return self.send_each([self.flats(inputs)], waiting)

    def send_each(self, each: Sequence[Flats], waiting: int) -> Ahead | CachedAhead:
        """Sends the pull of several lookups that are used later, in one pass; see ``send``."""
        if self._cache is None:
            parts = [self._prepared(flats) for flats in each]
            pulling = Pulling(_joined(parts), self._form)
            futures = self._client.start_pull(pulling.requests)
            for pulled in pulling.wanted:
                pulled.get_ready()
            return Ahead(self, each, parts, pulling, futures)
        wanted = self._reserved_each(each, waiting)
        try:
            rows = Pulling([part.fetch for part in _joined(wanted)], self._form)
            ages, futures = self._ages(), self._client.start_pull(rows.requests)
        except BaseException:
            for part in _joined(wanted):
                part.abandon()
            raise
        return CachedAhead(self, each, wanted, rows, ages, futures)

    def _drawn(
        self, each: Sequence[Flats], parts: Sequence[Sequence[Pulled]], found: Found
    ) -> list[Drawn]:
        rest = iter(found)
        return [
            Drawn(self, self._client.step, flats, list(itertools.islice(rest, len(own))))
            for flats, own in zip(each, parts, strict=True)
        ]

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

    def _looked(self, flats: Mapping[str, Flat]) -> Iterable[tuple[int, Router, list[Looked]]]:
        for stack, router in enumerate(self._routers):
            looked = [
                Looked(number, member, flats[member.config.name])
                for number, member in enumerate(router.stack.members)
                if member.config.name in flats
            ]
            if looked:
                yield stack, router, looked

    def _prepared(self, flats: Mapping[str, Flat]) -> list[Pulled]:
        return [
            pulled
            for stack, router, looked in self._looked(flats)
            for pulled in prepare(stack, router, looked)
        ]

    # Pulls without a cache

    def _pull(self, pulling: Pulling[Any]) -> dict[str, Any]:
        return self._client.pull(pulling.requests)

    def _pulled(self, pulling: Pulling[Pulled]) -> Found:
        def get_ready() -> None:
            for pulled in pulling.wanted:
                pulled.get_ready()

        return self._taken(pulling, self._client.pull(pulling.requests, get_ready))

    def pulled_ahead(self, pulling: Pulling[Pulled], answers: Mapping[str, Any]) -> Found:
        """Returns what was pulled ahead; pulls again what has changed, if it is too old."""
        client = self._client
        if client.is_bounded:
            old = {
                server: version
                for server, (version, _) in answers.items()
                if client.step - version > (client.staleness or 0)
            }
            for server in answers.keys() - old.keys():
                client.note_staleness(server, client.step - answers[server][0])
            if old:
                answers = {**answers, **self._refreshed(pulling, answers, old)}
        return self._taken(pulling, answers)

    def _refreshed(
        self, pulling: Pulling[Pulled], answers: Mapping[str, Any], old: Mapping[str, int]
    ) -> dict[str, Any]:
        """Returns the answers of some servers as they would be now."""
        requests = {
            server: [
                (*each, version) if len(each) == ROW_PARTS else each
                for each in pulling.requests[server]
            ]
            for server, version in old.items()
        }
        found, news_of = {}, self._client.refresh(requests)
        for part, places in zip(pulling.wanted, pulling.places, strict=True):
            moved = [
                (requests[server][place], news_of[server][1][place])
                for server, place in places.items()
                if server in old
            ]
            self._traffic[part.moved[0].table].pulled_bytes += size_bytes(moved)
        for server, (version, news) in news_of.items():
            values = [
                replaced(before, *new) if len(each) == ROW_PARTS else new
                for each, before, new in zip(
                    pulling.requests[server], answers[server][1], news, strict=True
                )
            ]
            found[server] = version, values
        return found

    def _taken(self, pulling: Pulling[Pulled], answers: Mapping[str, Any]) -> Found:
        self._count(pulling.wanted)
        found = []
        for pulled, answer in pulling.answers(answers):
            pulled.versions = answer.versions
            pulled.version = min(answer.versions.values(), default=self._client.step)
            self._note_staleness(pulled)
            found.append((pulled, pulled.gather(answer.values)))
        return found

    def _count(self, wanted: Iterable[Pulled]) -> None:
        for pulled in wanted:
            for moved in pulled.moved:
                traffic = self._traffic[moved.table]
                traffic.ids += moved.ids
                traffic.rows += moved.rows
                traffic.hits += moved.hits
                traffic.pulled_bytes += moved.pulled_bytes

    # Pulls with a cache

    def _ages(self, waiting: int = 0) -> Ages:
        """Returns the ages of rows that are used after some lookups have been used."""
        client, cache = self._client, self._cache
        assert cache is not None
        used = client.step + (waiting if self.is_trained else 0)
        bound = client.staleness if client.staleness is not None else cache.steps
        assert bound is not None
        return Ages(used - bound, client.step, client.staleness is None)

    def _reserved(self, flats: Mapping[str, Flat], waiting: int | None = None) -> list[CachedRows]:
        ages, is_ahead = self._ages(waiting or 0), waiting is not None
        return [
            CachedRows(stack, router, looked, self._caches[stack], ages, may_wait=is_ahead)
            for stack, router, looked in self._looked(flats)
        ]

    def _reserved_each(
        self, each: Sequence[Flats], waiting: int | None = None
    ) -> list[list[CachedRows]]:
        return [self._reserved(flats, waiting) for flats in each]

    def _settled(
        self,
        wanted: Sequence[CachedRows],
        rows: Pulling[Fetch],
        answers: Mapping[str, Any],
        asked: Ages,
    ) -> Found:
        """Takes rows over into the cache, pulls those again that are too old, and returns all."""
        for each, (fetch, answer) in zip(wanted, rows.answers(answers), strict=True):
            each.arrive(fetch, answer, asked)
        ages = self._ages()
        late = [(each, old) for each in wanted if (old := each.late(ages)) is not None]
        if late:
            again = Pulling([old for _, old in late], self._form)
            parts = again.answers(self._pull(again))
            for (each, _), (old, answer) in zip(late, parts, strict=True):
                each.arrive(old, answer, ages)
        oldest: dict[str, int] = {}
        found: Found = []
        for each in wanted:
            each.version = self._client.step
            values, versions = each.take()
            self._note_staleness(each)
            found.append((each, values))
            for server, version in versions.items():
                oldest[server] = min(version, oldest.get(server, version))
        if self._client.is_bounded:
            for server, version in oldest.items():
                self._client.note_staleness(server, self._client.step - version)
        self._count(wanted)
        return found

    def clear_cache(self) -> None:
        """Drops all rows that were kept."""
        for cache in self._caches:
            cache.clear()

    # Outputs

    def _outputs(self, flats: Flats, found: Found) -> dict[str, Tensor]:
        parts: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in flats}
        for pulled, values in found:
            pulled.place = next(self._places)
            if torch.is_grad_enabled():
                values = pulled.make_leaf(values, self._touch)
            for member, output in pulled.outputs(values):
                parts[member.config.name].append((member.columns.start, output))
        return {name: self._output(name, flat, parts[name]) for name, flat in flats.items()}

    def _output(self, name: str, flat: Flat, parts: list[tuple[int, Tensor]]) -> Tensor:
        if self._plan.placed[name].is_copied:
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

    def follow(self, before: Lookups) -> None:
        """Goes on from the lookups of another layout of the same tables."""
        self._traffic = before._traffic
        self.touched = before.touched
        self.is_trained = before.is_trained

    # Figures

    def note_pushed(self, pulled: Iterable[Pulled], versions: Mapping[str, int]) -> None:
        """Counts the bytes of a push, and in the asynchronous mode its staleness.

        Args:
            pulled: The lookups whose gradients were pushed.
            versions: The version of each server after the push.
        """
        for each in pulled:
            for moved in each.moved:
                self._traffic[moved.table].pushed_bytes += moved.pushed_bytes
            if self._client.staleness is None:
                # The push itself is one of those that were applied.
                ages = [
                    versions[server] - 1 - each.versions.get(server, each.version)
                    for server in each.versions or each.stack.servers
                    if server in versions
                ]
                self._note(each, max(ages, default=0))

    def _note_staleness(self, pulled: Pulled) -> None:
        if self._client.is_bounded:
            self._note(pulled, self._client.step - pulled.version)

    def _note(self, pulled: Pulled, staleness: int) -> None:
        for name in {looked.member.config.name for looked in pulled.looked}:
            self._traffic[name].note_staleness(staleness)

    def traffic(self) -> dict[str, Traffic]:
        """Returns what lookups and pushes have moved, by table."""
        return {
            name: replace(traffic, staleness=traffic.staleness.copy())
            for name, traffic in self._traffic.items()
        }


@dataclass(frozen=True)
class Drawn:
    """A lookup whose rows are here, and not yet used.

    Attributes:
        step: The trainer's step in which the rows are valid.
    """

    lookups: Lookups
    step: int
    flats: Flats
    found: Found

    @property
    def is_valid(self) -> bool:
        """Whether the trainer is still in the step for which the rows were pulled.

        Not after a re-sharding, which closes the client of the former places.
        """
        client = self.lookups._client
        return client.is_open and self.step == client.step

    def outputs(self) -> dict[str, Tensor]:
        """Returns the output of each table; once."""
        return self.lookups._outputs(self.flats, self.found)


@dataclass(frozen=True)
class Ahead:
    """Lookups of one pass that were sent before they are needed."""

    lookups: Lookups
    flats: Sequence[Flats]
    parts: Sequence[Sequence[Pulled]]
    pulling: Pulling[Pulled]
    futures: Mapping[str, Future[Any]]

    def drawn(self) -> list[Drawn]:
        """Waits for the rows, and returns the lookups."""
        found = self.lookups.pulled_ahead(self.pulling, wait_for(self.futures))
        return self.lookups._drawn(self.flats, self.parts, found)

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and returns the output of each table of the only lookup."""
        (drawn,) = self.drawn()
        return drawn.outputs()

    def cancel(self) -> None:
        """Ends the pull; its rows are not wanted."""
        for future in self.futures.values():
            future.cancel()


@dataclass(frozen=True)
class CachedAhead:
    """Lookups that were sent before they are needed; the cache holds their rows for them."""

    lookups: Lookups
    flats: Sequence[Flats]
    wanted: Sequence[Sequence[CachedRows]] = field(repr=False)
    rows: Pulling[Fetch]
    asked: Ages
    futures: Mapping[str, Future[Any]]

    def drawn(self) -> list[Drawn]:
        """Waits for the rows, and returns the lookups."""
        wanted, answers = _joined(self.wanted), wait_for(self.futures)
        found = self.lookups._settled(wanted, self.rows, answers, self.asked)
        return self.lookups._drawn(self.flats, self.wanted, found)

    def outputs(self) -> dict[str, Tensor]:
        """Waits for the rows, and returns the output of each table of the only lookup."""
        (drawn,) = self.drawn()
        return drawn.outputs()

    def cancel(self) -> None:
        """Ends the pull, and gives up the rows that are held for it."""
        for future in self.futures.values():
            future.cancel()
        for each in _joined(self.wanted):
            each.abandon()


def _joined(parts: Sequence[Sequence[P]]) -> list[P]:
    return [each for part in parts for each in part]


def _cache_of(cache: Cache, router: Router) -> RowCache:
    stack: Stack = router.stack
    keys = len(stack.servers) * stack.stride
    rows = sum(each.config.rows for each in stack.members)
    return RowCache(keys, int(cache.share * rows), stack.dim, stack.dtype, cache.policy)
