"""Groups of trainers, of which the first one pulls and pushes for all of them.

The rows that several members need in a step are pulled once, by the message of the first one that
asks for them; the others wait for it. The gradients of a step are summed before they are pushed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchweft.embedding.meeting import Meeting, call_each
from torchweft.embedding.rows import Part as Gradient
from torchweft.embedding.rows import encode, sum_rows
from torchweft.embedding.server import Host, Options, Push
from torchweft.embedding.steps import Steps
from torchweft.errors import ConfigurationError
from torchweft.extending import check_caller, check_types, present_workers
from torchweft.rpc import RRef, expose, functions, get_worker_info

Aggregate = Literal["host"] | Sequence[Sequence[str]] | None
Groups = tuple[tuple[str, ...], ...]
OfServer = tuple[Sequence[Push], Sequence[int]]
"""What a trainer pushes to one server: by stack, and the staleness of pulls to be counted."""


def groups_of(
    aggregate: Aggregate, trainers: Sequence[str], staleness: int | None, hosts: Mapping[str, str]
) -> Groups:
    """Returns the groups, in the order of their first trainers; none if each is alone.

    Args:
        aggregate: ``"host"``, lists of names, or None.
        trainers: All trainers, in their order.
        staleness: The bound; None for the asynchronous mode.
        hosts: The host of each trainer.

    Raises:
        ConfigurationError: The groups are not of all trainers, or cannot be in this mode.
    """
    if aggregate is None:
        return ()
    if staleness is None:
        raise ConfigurationError(
            "aggregate sums the pushes of a step, and with staleness=None trainers have no common "
            "steps; pass a bound, or leave aggregate out"
        )
    if aggregate == "host":
        by_host: dict[str, list[str]] = {}
        for name in trainers:
            by_host.setdefault(hosts[name], []).append(name)
        found = [tuple(names) for names in by_host.values()]
    elif isinstance(aggregate, str):
        raise ConfigurationError(f"aggregate={aggregate!r}; use 'host', or lists of trainers")
    else:
        found = [tuple(name for name in trainers if name in group) for group in aggregate]
        named = sorted(name for group in aggregate for name in group)
        if named != sorted(trainers) or not all(found):
            raise ConfigurationError(
                f"aggregate has the groups {[list(group) for group in aggregate]}, and the "
                f"trainers are {list(trainers)}; name each trainer in one group"
            )
    if all(len(group) == 1 for group in found):
        return ()
    return tuple(sorted(found, key=lambda group: list(trainers).index(group[0])))


def hosts_of(trainers: Sequence[str]) -> dict[str, str]:
    """Returns the host of each worker, by name.

    Raises:
        UnknownWorker: There is no such worker.
    """
    infos = [get_worker_info(name) for name in trainers]
    hosts = {member.name: member.host for member in present_workers()}
    return {info.name: hosts.get(info.name, info.name) for info in infos}


# The rows that the members have pulled in their step


@dataclass(eq=False)
class Batch:
    """Rows of one stack on one server, pulled by one message.

    Attributes:
        rows: The rows, each once, rising.
        values: Their values, in the form of messages; None while they are on their way.
        error: Why they will not come.
    """

    rows: Tensor
    values: Any = None
    error: BaseException | None = None


class Share(NamedTuple):
    """Some of the rows of a request.

    Attributes:
        batch: The batch that has them.
        places: Their positions in the request.
        sources: Their positions in the batch.
    """

    batch: Batch
    places: Tensor
    sources: Tensor


def share(rows: Tensor, batches: list[Batch]) -> tuple[list[Share], Batch | None]:
    """Returns which batches have rows; those that none has become a new one in the list.

    Args:
        rows: Rows, each once, rising.
        batches: The batches of the stack in this step; changed.

    Returns:
        The shares, and the batch that is to be pulled, if there is one.
    """
    shares = []
    left = torch.arange(len(rows), device="cpu")
    for batch in batches:
        if not len(left) or not len(batch.rows):
            continue
        wanted = rows[left]
        sources = torch.searchsorted(batch.rows, wanted).clamp_(max=len(batch.rows) - 1)
        is_there = batch.rows[sources] == wanted
        if bool(is_there.any()):
            shares.append(Share(batch, left[is_there], sources[is_there]))
            left = left[~is_there]
    if not len(left):
        return shares, None
    new = Batch(rows[left])
    batches.append(new)
    shares.append(Share(new, left, torch.arange(len(left), device="cpu")))
    return shares, new


def gathered(shares: Sequence[Share], count: int) -> Any:
    """Returns copies of the values of a request: a trainer makes them a leaf of its graph.

    Args:
        shares: The shares, whose values are here.
        count: Number of rows of the request.
    """

    def gather(*values: Tensor) -> Tensor:
        found = values[0].new_empty(count, *values[0].shape[1:])
        for each, own in zip(shares, values, strict=True):
            found[each.places] = own.index_select(0, each.sources)
        return found

    values = [each.batch.values for each in shares]
    if isinstance(values[0], Tensor):
        return gather(*values)
    return tuple(gather(*own) for own in zip(*values, strict=True))


# The worker that the others call


class MemberPush(NamedTuple):
    """What a member pushes in a step.

    Attributes:
        lr: The learning rate.
        seen: The oldest version of the rows of the step.
        pushes: By server.
    """

    lr: float
    seen: int
    pushes: Mapping[str, OfServer]


class Aggregator(Meeting[MemberPush]):
    """Pulls and pushes for the members of a group. Thread-safe.

    Args:
        name: Name of the collection.
        options: All that its trainers agree on.
        group: Number of the group.
        begin: The step that the group is in.
        hosts: The collection on its servers, by name.
        timeout_s: Limit of each call.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        group: int,
        begin: int,
        hosts: Mapping[str, RRef[Host]],
        timeout_s: float,
    ) -> None:
        self.members = options.groups[group]
        """Names of the members."""
        steps = Steps[MemberPush](self.members, 0, self.members[0], begin)
        super().__init__(name, steps, [(each,) for each in self.members])
        self._form = options.wire.pushed
        self._group = group
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._arrived = threading.Condition(self.lock)
        """Notified when rows have come, or will not."""
        self._batches: dict[tuple[str, int], list[Batch]] = {}
        self._versions: dict[str, int] = {}
        self._uncounted: dict[str, list[int]] = {}

    @expose
    def pull(
        self, member: int, step: int, requests: Mapping[str, Sequence[Any]]
    ) -> dict[str, tuple[int, list[Any]]]:
        """Returns what the servers would answer; they are asked for what no member has pulled."""
        self.check_pusher(member)
        asked: dict[str, list[Any]] = {}
        new: dict[str, list[Batch]] = {}
        answered: dict[str, list[list[Share]]] = {}
        with self.lock, self.blaming_the_lost():
            self.steps.check_pull(member, step)
            for server, of_server in requests.items():
                answered[server] = []
                for stack, rows, *bags in of_server:
                    batches = [] if bags else self._batches.setdefault((server, stack), [])
                    shares, batch = share(rows, batches)
                    if bags:  # Sums are of this member alone.
                        places, batch = torch.arange(bags[0], device="cpu"), Batch(rows)
                        shares = [Share(batch, places, places)]
                    answered[server].append(shares)
                    if batch is not None:
                        asked.setdefault(server, []).append((stack, batch.rows, *bags))
                        new.setdefault(server, []).append(batch)
        try:
            answers = self._call("pull", {server: (step, own) for server, own in asked.items()})
        except BaseException as error:
            self._give_up((each for own in new.values() for each in own), error)
            raise
        awaited = [each.batch for own in answered.values() for some in own for each in some]
        with self.lock:
            for server, (version, values) in answers.items():
                self._versions[server] = min(version, self._versions.get(server, version))
                for batch, own in zip(new[server], values, strict=True):
                    batch.values = own
            self._arrived.notify_all()
            # Each is pulled by a call that has a limit, and ends with rows or an error.
            self._arrived.wait_for(
                lambda: all(each.values is not None or each.error is not None for each in awaited)
            )
            for batch in awaited:
                if batch.error is not None:
                    raise batch.error
            versions = {server: self._versions.get(server, step) for server in requests}
            for server in requests.keys() - asked.keys():
                self._uncounted.setdefault(server, []).append(step - versions[server])
        return {
            server: (
                versions[server],
                [
                    gathered(shares, sum(len(each.places) for each in shares))
                    for shares in answered[server]
                ],
            )
            for server in requests
        }

    def _give_up(self, new: Iterable[Batch], error: BaseException) -> None:
        """Notes that rows will not come; the next pull asks for them again."""
        with self.lock:
            for batch in new:
                batch.error = error
                for batches in self._batches.values():
                    if batch in batches:
                        batches.remove(batch)
            self._arrived.notify_all()

    @expose
    @functions.async_execution
    def push(
        self, member: int, step: int, lr: float, seen: int, pushes: Mapping[str, OfServer]
    ) -> torch.futures.Future[dict[str, int]]:
        """Takes a member's gradients of a step; answered with the versions of the servers when the
        group may go on.
        """
        self.check_pusher(member)
        uncounted: dict[str, list[int]] = {}
        with self.lock, self.blaming_the_lost():
            due = self.steps.push(member, step, MemberPush(lr, seen, pushes), seen)
            future = self.await_answer(member, step)
            if due.applied:  # The rows of the step are forgotten.
                uncounted, self._uncounted = self._uncounted, {}
                self._batches.clear()
                self._versions.clear()
        self.fail(due.failed)
        for of_members in due.applied:
            try:
                versions = self._call("push", self._summed(step, of_members, uncounted))
            except BaseException as error:
                self.fail(due.answered, error)
            else:
                self.answer(due.answered, versions)
        return future

    def _summed(
        self, step: int, of_members: Sequence[MemberPush], uncounted: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[Any, ...]]:
        """Returns what is pushed to each server: sums over members, in their order."""
        lr, seen = of_members[0].lr, min(each.seen for each in of_members)
        found: dict[str, tuple[Any, ...]] = {}
        for server in self._hosts:
            by_stack: dict[int, tuple[int, list[Gradient]]] = {}
            ahead = [*uncounted.get(server, ())]
            for each in of_members:
                pushes, more = each.pushes.get(server, ((), ()))
                ahead += more
                for stack, used, parts in pushes:
                    before, others = by_stack.get(stack, (0, []))
                    by_stack[stack] = before | used, [*others, *parts]
            sums = []
            for stack, (used, own) in sorted(by_stack.items()):
                parts = [(*part, encode(values, self._form)) for *part, values in fewest(own)]
                sums.append((stack, used, parts))
            found[server] = step, lr, seen, sums, ahead
        return found

    def _call(self, method: str, given: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Calls servers as the trainer that this group is to them."""
        calls = {server: (self._group, *own) for server, own in given.items()}
        return call_each(self._hosts, method, calls, self._timeout_s)


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


def join(
    name: str,
    options: Options,
    group: int,
    begin: int,
    hosts: Mapping[str, RRef[Host]],
    timeout_s: float,
) -> tuple[RRef[Aggregator], list[int]]:
    """Returns the aggregator of a group, made if it does not exist, and the members' steps.

    Members call it by name.
    """
    check_types(options=(options, Options), group=(group, int))
    if not 0 <= group < len(options.groups):
        raise ConfigurationError(f"group {group} of {len(options.groups)} does not exist")
    what = f"join the group for tables {name!r}"
    check_caller(options.groups[group], what)

    def make() -> Aggregator:
        return Aggregator(name, options, group, begin, hosts, timeout_s)

    def check(found: Aggregator) -> None:
        check_caller(found.members, what)

    found = Aggregator.use(name, make, check)
    return RRef(found), [found.steps.step_of(each) for each in range(len(found.members))]
