"""The shards of a collection on one server, and the functions that trainers call there."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.embedding import telling
from torchweft.embedding.dynamic import DynamicShard, capacity_limit
from torchweft.embedding.errors import InputError, StepError, TablesMismatch
from torchweft.embedding.named import Named
from torchweft.embedding.plan import Layout, Stack
from torchweft.embedding.rows import Part
from torchweft.embedding.rules import Rule
from torchweft.embedding.shard import Gradients, Shard
from torchweft.embedding.steps import Due, Steps
from torchweft.embedding.wire import Wire, decode, encode
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.rpc import RRef, functions
from torchweft.rpc.current_call import check_caller, check_types, serves_another_strictly
from torchweft.rpc.observed import tell

_hosts: Named[Host] = Named("has no", "they live as long as a worker has not closed them")

NO_TRAINER = -1
"""In place of a trainer: a pull that servers do not count."""
Rows = tuple[int, Tensor]
"""A stack, and the rows to return."""
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

    def pusher_of(self, trainer: str) -> int:
        """Returns the number of the push that a trainer is part of; -1 if it is no trainer."""
        found = [number for number, names in enumerate(self.pushers) if trainer in names]
        return found[0] if found else -1


class Mark(NamedTuple):
    """Where the shards stood when a snapshot was taken or restored.

    Attributes:
        version: The version.
        steps: The steps of the first table of each stack.
    """

    version: int
    steps: dict[int, float]


class Lesson(NamedTuple):
    """Gradients of one trainer for one step.

    Attributes:
        lr: The learning rate.
        gradients: The gradients by stack.
    """

    lr: float
    gradients: dict[int, Gradients]


class Host:
    """The shards of a collection on this worker. Thread-safe.

    Args:
        options: The collection.
        name: Name of this worker.
    """

    def __init__(self, options: Options, name: str) -> None:
        self.options = options
        self.name = name
        self.shards = {
            number: _shard(stack, stack.servers.index(name), options)
            for number, stack in enumerate(options.layout.stacks)
            if name in stack.servers
        }
        names = [each[0] for each in options.pushers]
        self.steps: Steps[Lesson] = Steps(names, options.staleness, name)
        self._lock = threading.Lock()
        self.rule: Rule | None = None
        self.uses: Counter[int] = Counter()
        """How often each worker has made the collection and not closed it, by id."""
        self.marks: dict[str, Mark] = {}
        """By the mark of a snapshot whose rows these were: where they stood. The newest ones."""
        self._complete: deque[tuple[int, Sequence[Lesson]]] = deque()
        """Steps that all trainers have pushed and that are not applied yet, with their versions."""
        self._failure: Exception | None = None
        self._futures: dict[tuple[int, int], torch.futures.Future[int]] = {}
        self._lost: WorkerLost | None = None

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Holds the lock, while all complete steps are applied.

        Raises:
            StepError: One could not be applied.
        """
        with self._lock:
            self._apply_complete()
            if self._failure is not None:
                raise StepError(
                    f"server {self.name!r} has failed in the middle of a step, so some of its rows "
                    f"are those after it: {self._failure}; make the tables again, and restore a "
                    "snapshot",
                    server=self.name,
                    step=self.steps.version - 1,
                    expected=self.steps.version - 1,
                ) from self._failure
            yield

    # Trainers

    def check_pusher(self, trainer: int, *, is_of_group: bool = False) -> None:
        """Checks that the served call is of the worker that pulls and pushes as a trainer.

        Args:
            trainer: Number of the trainer, or of the group.
            is_of_group: Whether the other workers of a group may call, too.

        Raises:
            NotAllowed: It is of another worker.
            ConfigurationError: There is no such trainer.
        """
        check_types(trainer=(trainer, int))
        pushers = self.options.pushers
        if not 0 <= trainer < len(pushers):
            raise ConfigurationError(f"trainer {trainer} of {len(pushers)} does not exist")
        names = pushers[trainer] if is_of_group else pushers[trainer][:1]
        check_caller(names, f"pull or push as trainer {trainer} of tables")

    def pull(self, trainer: int, step: int, requests: Sequence[Any]) -> tuple[int, list[Any]]:
        """Returns the version, and the rows or the sums of bags for each request."""
        with self.settled(), self._blaming_the_lost():
            if trainer != NO_TRAINER:
                self.steps.check_pull(trainer, step)
            found = []
            for stack, *wanted in _own(requests):
                shard = self._shard(stack)
                found.append(shard.pool(*wanted) if len(wanted) > 1 else shard.pull(*wanted))
            version = self.steps.version
        return version, [encode(values, self.options.wire.pulled) for values in found]

    def refresh(self, trainer: int, step: int, requests: Sequence[Any]) -> tuple[int, list[Any]]:
        """Returns the version, and for each request what ``pull`` does, or what has changed.

        A request for rows has the version at which the trainer has pulled them: it is answered with
        the positions of the rows that have changed since, and their values.
        """
        with self.settled(), self._blaming_the_lost():
            if trainer != NO_TRAINER:
                self.steps.check_pull(trainer, step)
            form = self.options.wire.pulled
            found: list[Any] = []
            for stack, *wanted in _own(requests):
                shard = self._shard(stack)
                if len(wanted) > 2:
                    found.append(encode(shard.pool(*wanted), form))
                    continue
                rows, seen = wanted
                check_types(seen=(seen, int))
                places = shard.changed_since(rows, seen).nonzero().view(-1)
                found.append((places.to(rows.dtype), encode(shard.pull(rows[places]), form)))
            return self.steps.version, found

    def push(
        self,
        trainer: int,
        step: int,
        lr: float,
        seen: int,
        pushes: Sequence[Push],
        ahead: Sequence[int] = (),
    ) -> torch.futures.Future[int]:
        """Takes a trainer's gradients of a step; the future has the version after them.

        ``ahead`` has the staleness of each pull ahead whose rows were used in the step.
        """
        if self.rule is None:
            raise ConfigurationError(f"no optimizer is set for the tables on {self.name!r}")
        check_types(lr=(lr, (int, float)))
        lesson = Lesson(
            lr, {stack: self._checked(stack, used, parts) for stack, used, parts in _own(pushes)}
        )
        future: torch.futures.Future[int] = torch.futures.Future()
        with self.settled(), self._blaming_the_lost():
            due = self.steps.push(trainer, step, lesson, seen)
            self.steps.count(ahead)
            self._futures[trainer, step] = future
            version = self.steps.version
            self._complete.extend(enumerate(due.applied, start=version - len(due.applied) + 1))
        # Trainers go on while the step is applied: it was checked, and nobody sees rows before.
        self._settle(due, version)
        if due.applied:
            current().reactor.submit_task(self._apply_soon)
        return future

    def _apply_soon(self, *_: object) -> None:
        with self._lock:
            self._apply_complete()

    def _apply_complete(self) -> None:
        while self._complete and self._failure is None:
            version, lessons = self._complete.popleft()
            try:
                self._apply(lessons, version)
            except Exception as error:
                self._failure = error  # For all who ask for rows from now on.

    @contextlib.contextmanager
    def _blaming_the_lost(self) -> Iterator[None]:
        """Raises the loss of a trainer where a step is out of order because of it."""
        try:
            yield
        except StepError:
            if self._lost is not None:
                raise self._lost from None
            raise

    def _checked(self, stack: int, used: int, parts: Sequence[Part]) -> Gradients:
        check_types(used=(used, int))
        shard, form = self._shard(stack), self.options.wire.pushed
        tables = _tables(self.options.layout, stack)
        gradients = Gradients(
            used,
            [
                (*part, decode(values, form, shard.stack.dtype, self.name, tables))
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
            self._shard(stack).check(Gradients(0, parts))
        return own

    def _apply(self, lessons: Sequence[Lesson], version: int) -> None:
        divisor = self.options.pushes if self.options.averages else 1
        for number, shard in self.shards.items():
            pushed = [each.gradients[number] for each in lessons if number in each.gradients]
            shard.apply(pushed, lessons[0].lr, divisor, version)

    def _settle(self, due: Due[Lesson], version: int) -> None:
        """Answers pushes with a version; outside of the lock, as callbacks run here."""
        for each in due.answered:
            self._futures.pop(each).set_result(version)
        for each in due.failed:
            assert self._lost is not None
            self._futures.pop(each).set_exception(self._lost)  # type: ignore[arg-type]

    def worker_lost(self, error: WorkerLost) -> None:
        """Fails the pushes that wait for a worker, if it is a trainer."""
        pusher = self.options.pusher_of(error.worker)
        if pusher < 0:
            return
        with self._lock:
            self._lost = self._lost or error
            due = self.steps.lose(pusher)
        self._settle(due, self.steps.version)

    def _shard(self, stack: int) -> Shard:
        shard = self.shards.get(stack)
        if shard is None:
            tables = _tables(self.options.layout, stack)
            raise InputError(
                f"server {self.name!r} has no rows of stack {stack}{f', {tables}' * bool(tables)}",
                server=self.name,
                table=tables,
            )
        return shard

    # Set-up

    def set_rule(self, rule: Rule) -> None:
        """Sets the optimizer; nothing happens if it is set already.

        Raises:
            TablesMismatch: Another one is set.
        """
        with self.settled():
            if self.rule is not None and self.rule != rule:
                raise TablesMismatch(
                    f"the tables on {self.name!r} have the optimizer {self.rule}, and this trainer "
                    f"asks for {rule}; all trainers use the same",
                    server=self.name,
                    part="optimizer",
                )
            if self.rule is None:
                for shard in self.shards.values():
                    shard.set_rule(rule)
                self.rule = rule


def _tables(layout: Layout, stack: Any) -> str:
    """Returns the names of the tables of a stack, if there is such a stack."""
    if type(stack) is not int or not 0 <= stack < len(layout.stacks):
        return ""
    return ", ".join(dict.fromkeys(each.config.name for each in layout.stacks[stack].members))


def _own(value: Any) -> Any:
    """Copies tensors that another worker sent to a strict one: their sender may share the memory,
    and could change rows after they were checked.
    """
    if not serves_another_strictly():
        return value
    return copy.deepcopy(value)


def _shard(stack: Stack, server: int, options: Options) -> Shard:
    if not stack.is_dynamic:
        return Shard(stack, server, options.seed)
    largest = max(map(len, options.pushers)) if options.pushes > 1 else 1
    limit = capacity_limit(stack, server, options.pushes) * largest
    return DynamicShard(stack, server, options.seed, limit)


def host_of(name: str) -> Host:
    """Returns a collection's shards on this worker; raises ConfigurationError without any."""
    return _hosts.find(name)


# Functions that trainers call; by name.


def set_up(name: str, options: Options) -> tuple[RRef[Host], list[int]]:
    """Returns the shards of a collection, made if they do not exist, and the steps of its pushers.

    Raises:
        TablesMismatch: A collection of this name was made with other options.
    """
    check_types(options=(options, Options))
    check_types(layout=(options.layout, Layout))
    server = current().me.name

    def make() -> Host:
        made = Host(options, server)
        told = functools.partial(telling.of_server, name, weakref.ref(made))
        weakref.finalize(made, tell(told))
        return made

    host, is_fit = _hosts.use(name, make, lambda found: found.options == options)
    if not is_fit:
        part, theirs, ours = _difference(host.options, options)
        raise TablesMismatch(
            f"server {server!r} has tables under the name {name!r} that differ in {part}: it has "
            f"{theirs}, and this trainer asks for {ours}",
            server=server,
            part=part,
        )
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


def close(name: str) -> None:
    """Ends one worker's use of a collection; after the last one, its name is free."""
    _hosts.release(name)


def set_rule(name: str, rule: Rule) -> None:
    """Sets the optimizer of a collection."""
    check_types(rule=(rule, Rule))
    host_of(name).set_rule(rule)


def pull(name: str, trainer: int, step: int, requests: Sequence[Any]) -> tuple[int, list[Any]]:
    """Returns the version, and rows or sums of bags."""
    host = host_of(name)
    if trainer != NO_TRAINER:
        host.check_pusher(trainer)
    return host.pull(trainer, step, requests)


def refresh(name: str, trainer: int, step: int, requests: Sequence[Any]) -> tuple[int, list[Any]]:
    """Returns the version, and what has changed of rows that were pulled before."""
    host = host_of(name)
    if trainer != NO_TRAINER:
        host.check_pusher(trainer, is_of_group=True)
    return host.refresh(trainer, step, requests)


@functions.async_execution
def push(name: str, trainer: int, step: int, *given: Any) -> torch.futures.Future[int]:
    """Takes the gradients of a step; answered when the trainer may go on."""
    host = host_of(name)
    host.check_pusher(trainer)
    return host.push(trainer, step, *given)


def missing(name: str) -> list[str]:
    """Returns the trainers that have not pushed the step that is applied next."""
    host = host_of(name)
    with host.settled():
        return host.steps.missing()


def staleness(name: str) -> dict[int, int]:
    """Returns how often each staleness was observed on this server."""
    host = host_of(name)
    with host.settled():
        return dict(host.steps.staleness)


def read(name: str, stack: int, member: int) -> Tensor:
    """Returns this server's rows of a member of a stack."""
    host = host_of(name)
    with host.settled():
        return _rows_of(host, stack, member).clone()


def write(name: str, stack: int, member: int, values: Tensor) -> None:
    """Sets this server's rows of a member of a stack.

    Raises:
        InputError: The values have another shape or type; nothing was changed.
    """
    host = host_of(name)
    with host.settled():
        rows = _rows_of(host, stack, member)
        if values.shape != rows.shape or values.dtype != rows.dtype:
            raise InputError(
                f"server {host.name!r} was sent values {list(values.shape)} of {values.dtype} for "
                f"rows {list(rows.shape)} of {rows.dtype} of {_tables(host.options.layout, stack)}",
                server=host.name,
                table=_tables(host.options.layout, stack),
            )
        rows.copy_(values)
        # As the next step does: pulls of this version may have seen the rows as they were.
        host._shard(stack).note_changed(member, host.steps.version + 1)


def _rows_of(host: Host, stack: int, number: int) -> Tensor:
    return host._shard(stack).held(number)["weights"]


CALLABLES = (close, missing, pull, push, read, refresh, set_rule, set_up, staleness, write)
