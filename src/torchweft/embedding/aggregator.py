"""Pulls and pushes for a group of trainers: the side of the trainer that the others call."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchweft.embedding import host
from torchweft.embedding.calls import call_servers
from torchweft.embedding.errors import StepError
from torchweft.embedding.host import Options, Push
from torchweft.embedding.named import Named
from torchweft.embedding.rows import Part as Gradient
from torchweft.embedding.rows import sum_rows
from torchweft.embedding.sharing import Batch, Part, gathered, share
from torchweft.embedding.steps import Due, Steps
from torchweft.embedding.wire import encode
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.rpc import RRef, functions, get_worker_info
from torchweft.rpc.current_call import caller, check_caller, check_types

_aggregators: Named[Aggregator] = Named("aggregates no", "all members have closed them")

OfServer = tuple[Sequence[Push], Sequence[int]]
"""What a trainer pushes to one server: by stack, and the staleness of pulls to be counted."""


class Lesson(NamedTuple):
    """What a member pushes in a step.

    Attributes:
        lr: The learning rate.
        seen: The oldest version of the rows of the step.
        pushes: By server.
    """

    lr: float
    seen: int
    pushes: Mapping[str, OfServer]


class Aggregator:
    """Pulls and pushes for the members of a group. Thread-safe.

    Args:
        name: Name of the collection.
        options: The collection.
        group: Number of the group.
        begin: The step that the group is in.
        timeout_s: Limit of each call.
    """

    def __init__(
        self, name: str, options: Options, group: int, begin: int, timeout_s: float
    ) -> None:
        self.options = options
        self.uses: Counter[int] = Counter()
        """How often each member has joined and not left, by id."""
        self._name = name
        self._group = group
        self._timeout_s = timeout_s
        self.members = options.groups[group]
        """Names of the members."""
        self.steps: Steps[Lesson] = Steps(self.members, 0, self.members[0], begin)
        self._servers = {each: get_worker_info(each) for each in options.layout.servers}
        self.changed = threading.Condition()
        """Held for all that follows; notified when rows have come."""
        self._batches: dict[tuple[str, int], list[Batch]] = {}
        self._versions: dict[str, int] = {}
        self._uncounted: dict[str, list[int]] = {}
        self._futures: dict[tuple[int, int], torch.futures.Future[dict[str, int]]] = {}
        self._lost: WorkerLost | None = None

    def check_member(self, member: int) -> None:
        """Checks that the served call is of a member.

        Raises:
            NotAllowed: It is of another worker.
            ConfigurationError: There is no such member.
        """
        check_types(member=(member, int))
        if not 0 <= member < len(self.members):
            raise ConfigurationError(f"member {member} of {len(self.members)} does not exist")
        what = f"pull or push as member {member} of the group for tables {self._name!r}"
        check_caller(self.members[member : member + 1], what)

    # Pulls

    def pull(
        self, member: int, step: int, requests: Mapping[str, Sequence[Any]]
    ) -> dict[str, tuple[int, list[Any]]]:
        """Returns what the servers would answer; they are asked for what no member has pulled."""
        asked: dict[str, list[Any]] = {}
        new: dict[str, list[Batch | None]] = {}
        parts: dict[str, list[list[Part]]] = {}
        with self.changed, self._blaming_the_lost():
            self.steps.check_pull(member, step)
            for server, of_server in requests.items():
                parts[server] = []
                for stack, *wanted in of_server:
                    batch: Batch | None = None
                    own: list[Part] = []
                    if len(wanted) == 1:
                        batches = self._batches.setdefault((server, stack), [])
                        own, batch = share(wanted[0], batches)
                    parts[server].append(own)
                    if not own or batch is not None:
                        request = (stack, *wanted) if batch is None else (stack, batch.rows)
                        asked.setdefault(server, []).append(request)
                        new.setdefault(server, []).append(batch)
        try:
            answers = self._call(host.pull, {name: (step, own) for name, own in asked.items()})
        except BaseException as error:
            self._give_up(new, error)
            raise
        sums = self._arrived(new, answers)
        versions = self._waited(step, parts, asked)
        found: dict[str, tuple[int, list[Any]]] = {}
        for server, of_server in requests.items():
            rest = iter(sums.get(server, ()))
            values = [
                gathered(own, len(wanted[0])) if own else next(rest)
                for own, (_, *wanted) in zip(parts[server], of_server, strict=True)
            ]
            found[server] = versions[server], values
        return found

    def _give_up(self, new: Mapping[str, Sequence[Batch | None]], error: BaseException) -> None:
        """Notes that rows will not come; the next pull asks for them again."""
        with self.changed:
            for batch in (each for own in new.values() for each in own if each is not None):
                batch.error = error
                for batches in self._batches.values():
                    if batch in batches:
                        batches.remove(batch)
            self.changed.notify_all()

    def _arrived(
        self, new: Mapping[str, Sequence[Batch | None]], answers: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Takes over rows; returns the sums of each server in the order of requests."""
        sums: dict[str, list[Any]] = {}
        with self.changed:
            for server, (version, values) in answers.items():
                self._versions[server] = min(version, self._versions.get(server, version))
                for batch, own in zip(new[server], values, strict=True):
                    if batch is None:
                        sums.setdefault(server, []).append(own)
                    else:
                        batch.values = own
            self.changed.notify_all()
        return sums

    def _waited(
        self, step: int, parts: Mapping[str, Sequence[Sequence[Part]]], asked: Mapping[str, Any]
    ) -> dict[str, int]:
        """Waits for the rows that other members have asked for; returns the servers' versions."""
        awaited = [each.batch for own in parts.values() for some in own for each in some]
        with self.changed:
            # Each is pulled by a call that has a limit, and ends with rows or an error.
            self.changed.wait_for(lambda: all(batch.is_done for batch in awaited))
            for batch in awaited:
                if batch.error is not None:
                    raise batch.error
            versions = {server: self._versions.get(server, step) for server in parts}
            for server in parts.keys() - asked.keys():
                self._uncounted.setdefault(server, []).append(step - versions[server])
        return versions

    # Pushes

    def push(
        self, member: int, step: int, lr: float, seen: int, pushes: Mapping[str, OfServer]
    ) -> torch.futures.Future[dict[str, int]]:
        """Takes a member's gradients of a step; the future has the versions of the servers when the
        group may go on.
        """
        future: torch.futures.Future[dict[str, int]] = torch.futures.Future()
        with self.changed, self._blaming_the_lost():
            due = self.steps.push(member, step, Lesson(lr, seen, pushes), seen)
            self._futures[member, step] = future
            uncounted = self._end_step() if due.applied else {}
        self._fail(due)
        for lessons in due.applied:
            self._push(step, lessons, uncounted, due.answered)
        return future

    def _end_step(self) -> dict[str, list[int]]:
        """Forgets the rows of a step, and returns the pulls that servers have not counted."""
        uncounted, self._uncounted = self._uncounted, {}
        self._batches.clear()
        self._versions.clear()
        return uncounted

    def _push(
        self,
        step: int,
        lessons: Sequence[Lesson],
        uncounted: Mapping[str, Sequence[int]],
        answered: Sequence[tuple[int, int]],
    ) -> None:
        """Sends the sums of all members, and answers them."""
        futures = [self._futures.pop(each) for each in answered]
        seen = min(each.seen for each in lessons)
        try:
            given: dict[str, tuple[Any, ...]] = {}
            for server in self._servers:
                own = [each.pushes.get(server, ((), ())) for each in lessons]
                ahead = [*uncounted.get(server, ()), *(one for _, more in own for one in more)]
                sums = self._summed([pushes for pushes, _ in own])
                given[server] = (step, lessons[0].lr, seen, sums, ahead)
            versions = self._call(host.push, given)
        except BaseException as error:
            for future in futures:
                future.set_exception(error)  # type: ignore[arg-type]
            return
        for future in futures:
            future.set_result(versions)

    def _summed(self, members: Sequence[Sequence[Push]]) -> list[Push]:
        """Returns the sums over members, in their order, for one server."""
        by_stack: dict[int, tuple[int, list[Gradient]]] = {}
        for pushes in members:
            for stack, used, parts in pushes:
                before, others = by_stack.get(stack, (0, []))
                by_stack[stack] = before | used, [*others, *parts]
        form = self.options.wire.pushed
        return [
            (stack, used, [(*part, encode(values, form)) for *part, values in fewest(parts)])
            for stack, (used, parts) in sorted(by_stack.items())
        ]

    def _call(self, function: Any, given: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Calls servers as the trainer that this group is to them."""
        if not given:
            return {}
        calls = {
            self._servers[server]: (self._name, self._group, *own) for server, own in given.items()
        }
        return call_servers(function, calls, self._timeout_s)

    # Losses

    @contextlib.contextmanager
    def _blaming_the_lost(self) -> Iterator[None]:
        """Raises the loss of a member where a step is out of order because of it."""
        try:
            yield
        except StepError:
            if self._lost is not None:
                raise self._lost from None
            raise

    def worker_lost(self, error: WorkerLost) -> None:
        """Fails the pushes that wait for a worker, if it is a member."""
        if error.worker not in self.members:
            return
        with self.changed:
            self._lost = self._lost or error
            due = self.steps.lose(self.members.index(error.worker))
        self._fail(due)

    def _fail(self, due: Due[Lesson]) -> None:
        for each in due.failed:
            assert self._lost is not None
            self._futures.pop(each).set_exception(self._lost)  # type: ignore[arg-type]


def fewest(parts: Sequence[Gradient]) -> Sequence[Gradient]:
    """Returns gradients of the same rows, summed by row unless that takes more bytes."""
    if len(parts) < 2:
        return parts
    summed = sum_rows(parts)
    if all(len(part) == 2 for part in parts) or _size(summed) < sum(map(_size, parts)):
        return [summed]
    rows = [part for part in parts if len(part) == 2]
    return [*([sum_rows(rows)] if rows else []), *(part for part in parts if len(part) > 2)]


def _size(part: Gradient) -> int:
    return sum(each.nbytes for each in part if isinstance(each, torch.Tensor))


# Functions that members call; by name.


def join(
    name: str, options: Options, group: int, begin: int, timeout_s: float
) -> tuple[RRef[Aggregator], list[int]]:
    """Returns the aggregator of a group, made if it does not exist, and the members' steps."""
    check_types(options=(options, Options), group=(group, int))
    if not 0 <= group < len(options.groups):
        raise ConfigurationError(f"group {group} of {len(options.groups)} does not exist")
    what = f"join the group for tables {name!r}"
    check_caller(options.groups[group], what)
    who = caller().name

    def make() -> Aggregator:
        return Aggregator(name, options, group, begin, timeout_s)

    found, _ = _aggregators.use(name, make, lambda found: who in found.members)
    check_caller(found.members, what)
    return RRef(found), [found.steps.step_of(each) for each in range(len(options.groups[group]))]


def leave(name: str) -> None:
    """Ends a member's use of the aggregator; after the last one, its name is free."""
    _aggregators.release(name)


def pull(name: str, member: int, step: int, requests: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rows and sums by server, as servers would."""
    found = _aggregators.find(name)
    found.check_member(member)
    return found.pull(member, step, requests)


@functions.async_execution
def push(name: str, member: int, step: int, *given: Any) -> torch.futures.Future[dict[str, int]]:
    """Takes the gradients of a step; answered when the member may go on."""
    found = _aggregators.find(name)
    found.check_member(member)
    return found.push(member, step, *given)


def missing(name: str) -> list[str]:
    """Returns the members that have not pushed the step that the group is in."""
    found = _aggregators.find(name)
    with found.changed:
        return found.steps.missing()


CALLABLES = (join, leave, missing, pull, push)
