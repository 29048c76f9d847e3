"""One server's part of a collection: pulls and pushes of trainers, and the steps of its rows."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.embedding.dynamic import (
    ALL,
    ROWS,
    WAITING,
    DynamicShard,
    Occupancy,
    capacity_limit,
    overlaid,
)
from torchweft.embedding.errors import InputError, StepError, TablesMismatch
from torchweft.embedding.layout import (
    Held,
    Layout,
    Plain,
    Stack,
    common,
    from_plain,
    pieces_of,
    within,
)
from torchweft.embedding.meeting import Meeting
from torchweft.embedding.pieces import PLACES, Entry, Link, asked, cut
from torchweft.embedding.rows import Part, Wire, decode, encode
from torchweft.embedding.rules import Rule
from torchweft.embedding.shard import Gradients, Shard
from torchweft.embedding.steps import Steps
from torchweft.errors import BrokenChain, ConfigurationError
from torchweft.extending import (
    check_types,
    rebuilds_plain,
    run_in_background,
    serves_another_strictly,
    tell_numbers,
)
from torchweft.reports import NumberRow, NumberTable
from torchweft.rpc import RRef, expose, functions, get_worker_info

_MARKS = 256
"""The snapshots that a server knows as bases."""
NO_TRAINER = -1
"""In place of a trainer: a pull that servers do not count."""
ROW_PARTS = 2
"""The parts of a request for rows: stack and rows. With the version that the trainer has pulled,
one for those that have changed since; a request for sums of bags has more."""
Push = tuple[int, int, list[Part]]
"""A stack, its members that were looked up, and gradients."""


@rebuilds_plain
class Options(NamedTuple):
    """All that the trainers of a collection, and its servers, agree on.

    Attributes:
        layout: The stacks.
        trainers: Names of the trainers.
        staleness: The bound, or None for the asynchronous mode.
        averages: Whether the gradients of a step are averaged over the trainers.
        seed: Seed of the initial values.
        wire: The form of values in messages.
        groups: Trainers of which the first pulls and pushes for all; none if each is alone.
    """

    layout: Layout
    trainers: tuple[str, ...]
    staleness: int | None
    averages: bool
    seed: int
    wire: Wire = Wire()
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def pushes(self) -> int:
        """The number of trainers whose gradients are in a step."""
        return 1 if self.staleness is None else len(self.trainers)

    @property
    def pushers(self) -> tuple[tuple[str, ...], ...]:
        """The trainers of each push of a step."""
        return self.groups or tuple((name,) for name in self.trainers)


class GradientPush(NamedTuple):
    """Gradients of one trainer for one step.

    Attributes:
        lr: The learning rate.
        gradients: The gradients by stack.
    """

    lr: float
    gradients: dict[int, Gradients]


class Mark(NamedTuple):
    """Where the shards stood when a snapshot was taken or restored.

    Attributes:
        version: The version.
        steps: The steps of the first table of each stack.
    """

    version: int
    steps: dict[int, float]


class Host(Meeting[GradientPush]):
    """The shards of a collection on this worker. Thread-safe.

    Args:
        name: Name of the collection.
        options: All that its trainers agree on.
        server: Name of this worker.
    """

    def __init__(self, name: str, options: Options, server: str) -> None:
        pushers = options.pushers
        steps = Steps[GradientPush]([each[0] for each in pushers], options.staleness, server)
        super().__init__(name, steps, pushers)
        self.server = server
        self.options = options
        self.layout = options.layout
        self.shards = {
            number: _shard(stack, stack.servers.index(server), options)
            for number, stack in enumerate(options.layout.stacks)
            if server in stack.servers
        }
        self.rule: Rule | None = None
        self.marks: dict[str, Mark] = {}
        """By the mark of a snapshot whose rows these were: where they stood. The newest ones."""
        self._complete: deque[tuple[int, Sequence[GradientPush]]] = deque()
        """Steps that all trainers have pushed and that are not applied yet, with their versions."""
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Holds the lock, while all complete steps are applied.

        Raises:
            StepError: One could not be applied.
        """
        with self.lock:
            self._apply_complete()
            if self._failure is not None:
                step = self.steps.version - 1
                raise StepError(
                    f"server {self.server!r} has failed in the middle of a step, so some of its "
                    f"rows are those after it: {self._failure}; make the tables again, and restore "
                    "a snapshot",
                    server=self.server,
                    step=step,
                    expected=step,
                ) from self._failure
            yield

    @expose
    def set_rule(self, rule: Rule) -> None:
        """Sets the optimizer; nothing happens if it is set already.

        Raises:
            TablesMismatch: Another one is set.
        """
        check_types(rule=(rule, Rule))
        with self.settled():
            if self.rule is not None and self.rule != rule:
                raise TablesMismatch(
                    f"the tables on {self.server!r} have the optimizer {self.rule}, and this "
                    f"trainer asks for {rule}; all trainers use the same",
                    server=self.server,
                    part="optimizer",
                )
            if self.rule is None:
                for shard in self.shards.values():
                    shard.set_rule(rule)
                self.rule = rule

    @expose
    def pull(self, trainer: int, step: int, requests: Sequence[Any]) -> tuple[int, list[Any]]:
        """Returns the version; and for each request rows, what has changed of them, or sums.

        What has changed are the positions of rows that changed after a version, and their values.
        """
        if trainer != NO_TRAINER:
            self.check_pusher(trainer, is_of_group=True)
        form = self.options.wire.pulled
        found: list[Any] = []
        with self.settled(), self.blaming_the_lost():
            if trainer != NO_TRAINER:
                self.steps.check_pull(trainer, step)
            for stack, rows, *more in _own(requests):
                shard = self.shard(stack)
                if not more:
                    found.append(shard.pull(rows))
                elif len(more) > 1:
                    found.append(shard.pool(rows, *more))
                else:
                    check_types(seen=(more[0], int))
                    places = shard.changed_since(rows, more[0]).nonzero().view(-1)
                    found.append((places.to(rows.dtype), shard.pull(rows[places])))
            version = self.steps.version
        encoded = [
            (each[0], encode(each[1], form)) if isinstance(each, tuple) else encode(each, form)
            for each in found
        ]
        return version, encoded

    @expose
    @functions.async_execution
    def push(
        self,
        trainer: int,
        step: int,
        lr: float,
        seen: int,
        pushes: Sequence[Push],
        ahead: Sequence[int] = (),
    ) -> torch.futures.Future[int]:
        """Takes a trainer's gradients of a step; answered with the version when it may go on.

        Args:
            trainer: Number of the trainer, or of the group.
            step: The step.
            lr: The learning rate.
            seen: The oldest version of the rows of the step.
            pushes: The gradients.
            ahead: The staleness of each pull ahead whose rows were used in the step.
        """
        self.check_pusher(trainer)
        if self.rule is None:
            raise ConfigurationError(f"no optimizer is set for the tables on {self.server!r}")
        check_types(lr=(lr, (int, float)))
        gradients = {stack: self._checked(stack, *rest) for stack, *rest in _own(pushes)}
        with self.settled(), self.blaming_the_lost():
            due = self.steps.push(trainer, step, GradientPush(lr, gradients), seen)
            self.steps.count(ahead)
            future = self.await_answer(trainer, step)
            version = self.steps.version
            self._complete.extend(enumerate(due.applied, start=version - len(due.applied) + 1))
        # Trainers go on while the step is applied: it was checked, and nobody sees rows before.
        self.answer(due.answered, version)
        self.fail(due.failed)
        if due.applied:
            run_in_background(self._apply_soon)
        return future

    def _apply_soon(self) -> None:
        with self.lock:
            self._apply_complete()

    def _apply_complete(self) -> None:
        while self._complete and self._failure is None:
            version, pushes = self._complete.popleft()
            try:
                divisor = self.options.pushes if self.options.averages else 1
                for number, shard in self.shards.items():
                    pushed = [each.gradients[number] for each in pushes if number in each.gradients]
                    shard.apply(pushed, pushes[0].lr, divisor, version)
            except Exception as error:
                self._failure = error  # For all who ask for rows from now on.

    def _checked(self, stack: int, used: int, parts: Sequence[Part]) -> Gradients:
        check_types(used=(used, int))
        shard, form = self.shard(stack), self.options.wire.pushed
        tables = self.tables_of(stack)
        gradients = Gradients(
            used,
            [
                (*part, decode(values, form, shard.stack.dtype, self.server, tables))
                for *part, values in parts
            ],
        )
        shard.check(gradients)
        return gradients

    def checked(self, stacks: dict[int, list[Part]]) -> dict[int, list[Part]]:
        """Returns gradients of rows by stack, which fit the rows here.

        Raises:
            IdOutOfRange: There is no such row.
            InputError: They do not fit the rows, or there is no such stack here.
        """
        own: dict[int, list[Part]] = _own(stacks)
        for stack, parts in own.items():
            self.shard(stack).check(Gradients(0, parts))
        return own

    @expose
    def staleness(self) -> dict[int, int]:
        """Returns how often each staleness was observed on this server."""
        with self.settled():
            return dict(self.steps.staleness)

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
        for steps, found in asked(entry, "take", wanted, timeout_s):
            places = found[PLACES] * step + start
            with self.settled():
                for key, tensor in shard.held(held.member).items():
                    own = cut(tensor, within(columns, target.columns), len(target.columns))
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
                    for of_table, found in asked(entry, "take_ids", wanted, timeout_s):
                        steps = of_table
                        for key, each in found.items():
                            parts.setdefault(key, []).append(each)
            joined = {key: torch.cat(each) for key, each in parts.items()}
            content = overlaid(content, joined) if number else joined
        with self.settled():
            shard.replace(content, steps)


def _own(value: Any) -> Any:
    """Copies tensors that another worker sent to a strict one: their sender may share the memory,
    and could change rows after they were checked.
    """
    return copy.deepcopy(value) if serves_another_strictly() else value


def _shard(stack: Stack, server: int, options: Options) -> Shard:
    if not stack.is_dynamic:
        return Shard(stack, server, options.seed)
    largest = max(map(len, options.pushers)) if options.pushes > 1 else 1
    limit = capacity_limit(stack, server, options.pushes) * largest
    return DynamicShard(stack, server, options.seed, limit)


def host_of(name: str) -> Host:
    """Returns a collection's shards on this worker.

    Raises:
        ConfigurationError: It has none under this name.
    """
    check_types(name=(name, str))
    found: Host | None = Host.named.get(name)
    if found is None:
        raise ConfigurationError(
            f"worker {get_worker_info().name!r} has no tables under the name {name!r}; they live "
            "as long as a worker has not closed them"
        )
    return found


def set_up(name: str, options: Options) -> tuple[RRef[Host], list[int]]:
    """Returns the shards of a collection, made if they do not exist, and the steps of its pushers.

    Other workers call it by name.

    Raises:
        TablesMismatch: A collection of this name was made with other options.
    """
    check_types(options=(options, Options))
    check_types(layout=(options.layout, Layout))
    server = get_worker_info().name

    def make() -> Host:
        made = Host(name, options, server)
        weakref.finalize(made, tell_numbers(functools.partial(_told, name, weakref.ref(made))))
        return made

    def check(found: Host) -> None:
        if found.options != options:
            part, theirs, ours = _difference(found.options, options)
            raise TablesMismatch(
                f"server {server!r} has tables under the name {name!r} that differ in {part}: it "
                f"has {theirs}, and this trainer asks for {ours}",
                server=server,
                part=part,
            )

    host = Host.use(name, make, check)
    return RRef(host), [host.steps.step_of(number) for number in range(len(options.pushers))]


def _difference(first: Options, second: Options) -> tuple[str, object, object]:
    """Returns the name of what differs, and both values."""
    for option in ("trainers", "staleness", "averages", "seed", "wire", "groups"):
        one, other = getattr(first, option), getattr(second, option)
        if one != other:
            return option, one, other
    members = [
        {
            (member.config.name, member.columns): (member.config, stack.servers, member.server)
            for stack in options.layout.stacks
            for member in stack.members
        }
        for options in (first, second)
    ]
    for key in dict.fromkeys([*members[0], *members[1]]):
        one, other = (each.get(key) for each in members)
        if one != other:
            return f"table {key[0]!r}", one, other
    return "the order of tables", first.layout.servers, second.layout.servers


def _told(name: str, find: Callable[[], Host | None]) -> NumberTable:
    """Returns what a server holds of a collection: the rows that it uses, and their memory."""
    host, found = find(), []
    if host is not None:
        shards = host.shards.values()
        tensors = [
            each
            for shard in shards
            for each in (shard.weights, shard.changed, *shard.state.values())
        ]
        numbers = {
            "rows": float(sum(shard.used_rows for shard in shards)),
            "memory bytes": float(sum(each.nbytes for each in tensors)),
            "version": float(host.steps.version),
        }
        found.append(NumberRow((name,), numbers, shown_staleness(host.steps.staleness)))
    return NumberTable("embedding servers", ("collection",), tuple(found))


def shown_staleness(counts: dict[int, int]) -> dict[str, dict[str, int]]:
    """Returns the histogram of a staleness for observers."""
    return {"staleness": {str(each): count for each, count in sorted(dict(counts).items())}}
