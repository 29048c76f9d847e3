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

from torchweft.embedding.dynamic import DynamicShard, capacity_limit
from torchweft.embedding.errors import StepError, TablesMismatch
from torchweft.embedding.layout import Layout, Stack
from torchweft.embedding.pieces import Pieces
from torchweft.embedding.rows import Part, Wire, decode, encode
from torchweft.embedding.rules import Rule
from torchweft.embedding.shard import Gradients, Shard
from torchweft.embedding.steps import Steps
from torchweft.errors import ConfigurationError
from torchweft.extending import (
    NumberRow,
    NumberTable,
    check_types,
    rebuilds_plain,
    run_in_background,
    serves_another_strictly,
    tell_numbers,
)
from torchweft.rpc import RRef, expose, functions, get_worker_info

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


class Host(Pieces[GradientPush]):
    """The shards of a collection on this worker. Thread-safe.

    Args:
        name: Name of the collection.
        options: All that its trainers agree on.
        server: Name of this worker.
    """

    def __init__(self, name: str, options: Options, server: str) -> None:
        shards = {
            number: _shard(stack, stack.servers.index(server), options)
            for number, stack in enumerate(options.layout.stacks)
            if server in stack.servers
        }
        pushers = options.pushers
        steps = Steps[GradientPush]([each[0] for each in pushers], options.staleness, server)
        super().__init__(name, server, options.layout, shards, steps, pushers)
        self.options = options
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
