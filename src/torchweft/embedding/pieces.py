"""The pieces of tables on one server: read and set, saved and restored, moved to other servers.

Each piece is an entry of a snapshot, with the optimizer's state beside its rows. When a snapshot is
restored, some server receives each saved piece. After that every server takes the rows that it
needs from the servers that received them. So the layout may be another one.

An *increment* has the rows that changed since an earlier snapshot, its *base*. A server knows by a
*mark* at which of its versions it had the rows of that snapshot. Restored are a full snapshot and
the increments that follow it, the *links* of a chain.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchweft.embedding.dynamic import (
    ALL,
    ROWS,
    WAITING,
    DynamicShard,
    Occupancy,
    overlaid,
    server_of,
)
from torchweft.embedding.errors import InputError, StepError
from torchweft.embedding.layout import (
    Cut,
    Held,
    Layout,
    Plain,
    common,
    from_plain,
    pieces_of,
    within,
)
from torchweft.embedding.meeting import Meeting, P
from torchweft.embedding.rules import Rule
from torchweft.embedding.shard import CHANGED, Shard
from torchweft.embedding.steps import Steps
from torchweft.errors import BrokenChain
from torchweft.extending import check_types
from torchweft.rpc import RRef, expose

_CHUNK_BYTES = 1 << 26
"""Rows that one message moves."""
_MARKS = 256
"""The snapshots that a server knows as bases."""
_PLACES: Final = "places"

Taken = tuple[bool, float, dict[str, Tensor]]
"""Whether there is more; the steps of the table; and tensors with equally many rows, by name."""


class Entry:
    """A piece of a table, in the form that snapshots save and restore.

    Args:
        read: Returns the content; an entry that receives a piece needs none.
    """

    def __init__(self, read: Callable[[], dict[str, Any]] = dict) -> None:
        self._read = read
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows, the optimizer's state beside them, and the steps of the table."""
        return self._read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the content of a snapshot until other servers have taken it."""
        self.content = state

    @expose
    def take(self, rows: Cut, columns: Cut, width: int, begin: int) -> Taken:
        """Returns some rows and columns, with their places among these rows.

        Args:
            rows: The rows, as positions in the piece; of an increment, those that it has.
            columns: The columns.
            width: Number of columns of the piece.
            begin: How many of these rows the caller has already.
        """
        tensors = dict(self.content["tensors"])
        changed, (start, stop, step) = tensors.pop(CHANGED, None), rows
        if changed is None:
            own = positions = torch.arange(start, stop, step, device="cpu")
        else:
            is_wanted = (changed >= start) & (changed < stop) & ((changed - start) % step == 0)
            own = is_wanted.nonzero().view(-1)
            positions = changed[own]
        chosen = _chunk(tensors, begin)
        found = {key: _cut(each, columns, width)[own[chosen]] for key, each in tensors.items()}
        found[_PLACES] = (positions[chosen] - start) // step
        return chosen.stop < len(own), self.content["steps"], found

    @expose
    def take_ids(self, prefix: str, servers: int, server: int, begin: int) -> Taken:
        """Returns ids of a dynamic table which belong on a server, with their rows.

        Args:
            prefix: How the names of the wanted tensors begin.
            servers: Number of servers that the table has now.
            server: Position of the server among them.
            begin: How many of these ids it has already.
        """
        tensors = self.content["tensors"]
        group = {key: each for key, each in tensors.items() if key.startswith(prefix)}
        own = (server_of(group[f"{prefix}ids"], servers) == server).nonzero().view(-1)
        chosen = _chunk(group, begin)
        found = {key: each[own[chosen]] for key, each in group.items()}
        return chosen.stop < len(own), self.content["steps"], found


Link = Sequence[tuple[Plain, RRef[Entry]]]
"""The pieces of a snapshot, and the entries that received them."""


class Mark(NamedTuple):
    """Where the shards stood when a snapshot was taken or restored.

    Attributes:
        version: The version.
        steps: The steps of the first table of each stack.
    """

    version: int
    steps: dict[int, float]


class Pieces(Meeting[P], abc.ABC):
    """The shards of a collection on one server. Thread-safe.

    Args:
        name: Name of the collection.
        server: Name of this worker.
        layout: The stacks.
        shards: The shards here, by stack.
        steps: The steps of the trainers.
        pushers: See ``Meeting``.
    """

    def __init__(
        self,
        name: str,
        server: str,
        layout: Layout,
        shards: dict[int, Shard],
        steps: Steps[P],
        pushers: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(name, steps, pushers)
        self.server = server
        self.layout = layout
        self.shards = shards
        self.rule: Rule | None = None
        self.marks: dict[str, Mark] = {}
        """By the mark of a snapshot whose rows these were: where they stood. The newest ones."""

    @abc.abstractmethod
    def settled(self) -> AbstractContextManager[None]:
        """Holds the lock, while all complete steps are applied."""

    def shard(self, stack: int) -> Shard:
        """Returns the shard of a stack.

        Raises:
            InputError: There is none here.
        """
        found = self.shards.get(stack)
        if found is None:
            tables = self.tables_of(stack)
            raise InputError(
                f"server {self.server!r} has no rows of stack {stack}"
                f"{f', {tables}' * bool(tables)}",
                server=self.server,
                table=tables,
            )
        return found

    def tables_of(self, stack: Any) -> str:
        """Returns the names of the tables of a stack, if there is such a stack."""
        if type(stack) is not int or not 0 <= stack < len(self.layout.stacks):
            return ""
        members = self.layout.stacks[stack].members
        return ", ".join(dict.fromkeys(each.config.name for each in members))

    # Whole tables

    @expose
    def read(self, stack: int, member: int) -> Tensor:
        """Returns this server's rows of a member of a stack."""
        with self.settled():
            return self.shard(stack).held(member)["weights"].clone()

    @expose
    def write(self, stack: int, member: int, values: Tensor) -> None:
        """Sets this server's rows of a member of a stack.

        Raises:
            InputError: The values have another shape or type; nothing was changed.
        """
        with self.settled():
            rows = self.shard(stack).held(member)["weights"]
            if values.shape != rows.shape or values.dtype != rows.dtype:
                raise InputError(
                    f"server {self.server!r} was sent values {list(values.shape)} of "
                    f"{values.dtype} for rows {list(rows.shape)} of {rows.dtype} of "
                    f"{self.tables_of(stack)}",
                    server=self.server,
                    table=self.tables_of(stack),
                )
            rows.copy_(values)
            # As the next step does: pulls of this version may have seen the rows as they were.
            self.shard(stack).note_changed(member, self.steps.version + 1)

    @expose
    def rows(self, table: str) -> list[tuple[Tensor, Tensor]]:
        """Returns the ids of a dynamic table that have rows here, and these, if there are any."""
        with self.settled():
            return [shard.rows() for name, shard in self._dynamic() if name == table]

    @expose
    def occupancy(self) -> dict[str, Occupancy]:
        """Returns how many ids of each dynamic table have rows on this server."""
        with self.settled():
            return {name: shard.occupancy() for name, shard in self._dynamic()}

    def _dynamic(self) -> Iterator[tuple[str, DynamicShard]]:
        for shard in self.shards.values():
            if isinstance(shard, DynamicShard):
                yield shard.stack.members[0].config.name, shard

    # Snapshots

    @expose
    def standing(self) -> tuple[int, bool, str]:
        """Returns where this server stands between steps.

        Returns:
            The version; whether no pushes wait for those of other trainers; and the optimizer with
            its settings, or nothing.
        """
        with self.settled():
            rule = "" if self.rule is None else self.rule.settings()
            return self.steps.version, self.steps.is_between, rule

    @expose
    def leave(self, version: int, mark: str, since: str | None) -> list[RRef[Entry]]:
        """Returns an entry for each piece of this server, whose content is that of a version.

        Args:
            version: The version.
            mark: Mark of the new snapshot.
            since: Mark of its base; None for all rows.

        Raises:
            BrokenChain: The rows here do not come from the base.
            StepError: A step was applied since the caller asked for the version.
        """
        check_types(mark=(mark, str), version=(version, int))
        with self.settled():
            base = None if since is None else self.marks.get(since)
            if since is not None and base is None:
                raise BrokenChain(
                    f"the rows of {self.name!r} on server {self.server!r} do not come from it",
                    worker=self.server,
                )
            self._check_version(version)
            self.set_mark(mark)

        def reader(held: Held) -> Callable[[], dict[str, Any]]:
            def read() -> dict[str, Any]:
                with self.settled():
                    self._check_version(version)
                    # Copied under the lock: later pushes change these rows.
                    return self.content_of(held, base)

            return read

        return [RRef(Entry(reader(held))) for held in self.held()]

    @expose
    def offer(self) -> list[RRef[Entry]]:
        """Returns an entry for each piece of this server, with the rows themselves.

        No trainer makes a step until other servers have taken them.
        """
        entries = []
        with self.settled():
            for held in self.held():
                entry, shard = Entry(), self.shards[held.stack]
                is_dynamic = isinstance(shard, DynamicShard)
                tensors = shard.copied(held.member) if is_dynamic else shard.held(held.member)
                entry.content = {"tensors": tensors, "steps": float(shard.steps[held.member])}
                entries.append(RRef(entry))
        return entries

    @expose
    def receive(self, count: int) -> list[RRef[Entry]]:
        """Returns entries that take up pieces of a snapshot."""
        check_types(count=(count, int))
        return [RRef(Entry()) for _ in range(count)]

    @expose
    def adopt(self, links: Sequence[Link], mark: str, timeout_s: float) -> None:
        """Sets this server's rows and their state to those of a snapshot, which servers received.

        Args:
            links: The pieces of a full snapshot, and of the increments that follow it.
            mark: The mark of the last one.
            timeout_s: Limit of each call.
        """
        with self.settled():
            self.marks.clear()  # From here on, these are no snapshot's rows.
        for held in self.held():
            own = [[each for each in link if each[0][0] == held.piece.table] for link in links]
            shard = self.shards[held.stack]
            if isinstance(shard, DynamicShard):
                self._adopt_ids(shard, own, timeout_s)
                continue
            for link in own:
                for plain, entry in link:
                    self._adopt(held, plain, entry, timeout_s)
        with self.settled():
            for shard in self.shards.values():
                shard.changed.fill_(self.steps.version)
            self.set_mark(mark)

    def held(self) -> list[Held]:
        """Returns the pieces of this server."""
        return [each for each in pieces_of(self.layout) if each.piece.server == self.server]

    def set_mark(self, mark: str) -> None:
        """Notes that these rows are those of a snapshot."""
        steps = {number: float(shard.steps[0]) for number, shard in self.shards.items()}
        self.marks[mark] = Mark(self.steps.version, steps)
        while len(self.marks) > _MARKS:
            del self.marks[next(iter(self.marks))]

    def content_of(self, held: Held, since: Mark | None) -> dict[str, Any]:
        """Returns copies of a piece; of the rows that changed since a mark, if there is one."""
        shard = self.shards[held.stack]
        if since is None:
            tensors = shard.copied(held.member)
        else:
            tensors = shard.copied_since(held.member, since.version, since.steps[held.stack])
        return {"tensors": tensors, "steps": float(shard.steps[held.member])}

    def _check_version(self, version: int) -> None:
        # With a bound, a push that waits is of a trainer that may have gone on.
        is_ahead = self.steps.may_be_ahead and not self.steps.is_between
        if self.steps.version != version or is_ahead:
            raise StepError(
                f"server {self.server!r} is at version {self.steps.version}, and the snapshot is "
                f"of version {version}: a trainer has pushed while it was taken; have all "
                "trainers wait until it is saved",
                server=self.server,
                step=version,
                expected=self.steps.version,
            )

    def _adopt(self, held: Held, plain: Plain, entry: RRef[Entry], timeout_s: float) -> None:
        """Takes over what a piece here and one of a snapshot have in common."""
        target, source, shard = held.piece, from_plain(plain), self.shards[held.stack]
        rows, columns = common(target.rows, source.rows), common(target.columns, source.columns)
        if not columns or not rows:
            return
        wanted = within(rows, source.rows), within(columns, source.columns), len(source.columns)
        start, _, step = within(rows, target.rows)
        for steps, found in _asked(entry, "take", wanted, timeout_s):
            places = found[_PLACES] * step + start
            with self.settled():
                for key, tensor in shard.held(held.member).items():
                    own = _cut(tensor, within(columns, target.columns), len(target.columns))
                    own[places] = found[key]
                shard.steps[held.member] = steps

    def _adopt_ids(self, shard: DynamicShard, links: Sequence[Link], timeout_s: float) -> None:
        """Takes over those ids of a dynamic table that belong here."""
        servers = shard.stack.servers
        content: dict[str, Tensor] = {}
        steps = 0.0
        for number, link in enumerate(links):
            parts: dict[str, list[Tensor]] = {}
            for prefix in (ROWS, WAITING, ALL + ROWS, ALL + WAITING)[: 4 if number else 2]:
                wanted = prefix, len(servers), servers.index(self.server)
                for _, entry in link:
                    for of_table, found in _asked(entry, "take_ids", wanted, timeout_s):
                        steps = of_table
                        for key, each in found.items():
                            parts.setdefault(key, []).append(each)
            joined = {key: torch.cat(each) for key, each in parts.items()}
            content = overlaid(content, joined) if number else joined
        with self.settled():
            shard.replace(content, steps)


def _asked(
    entry: RRef[Entry], method: str, wanted: tuple[Any, ...], timeout_s: float
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yields what an entry has of the wanted rows, in chunks; at least one."""
    found: Any = entry.local_value() if entry.is_owner() else entry.rpc_sync(timeout_s)
    if entry.is_owner():
        check_types(entry=(found, Entry))
    begin, has_more = 0, True
    while has_more:
        has_more, steps, tensors = getattr(found, method)(*wanted, begin)
        begin += len(next(iter(tensors.values())))
        yield steps, tensors


def _chunk(tensors: dict[str, Tensor], begin: int) -> slice:
    """Returns which rows, from a first one on, are sent in one message."""
    row_bytes = sum(math.prod(each.shape[1:]) * each.itemsize for each in tensors.values())
    return slice(begin, begin + max(1, _CHUNK_BYTES // row_bytes))


def _cut(tensor: Tensor, columns: Cut, width: int) -> Tensor:
    """Returns columns, if the tensor has them: some state is one value for each row."""
    return tensor[:, slice(*columns)] if tensor.shape[1] == width else tensor
