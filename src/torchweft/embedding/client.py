"""A trainer's calls to the servers of a collection: its own, or those of its group.

In a group the first trainer pulls and pushes for all of them. The rows that several members need in
a step are pulled once, by the message of the first one that asks for them; the others wait for it.
The gradients of a step are summed before they are pushed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchweft.embedding.errors import StepError
from torchweft.embedding.meeting import Meeting
from torchweft.embedding.rows import Part, encode, sum_rows
from torchweft.embedding.server import NO_TRAINER, Host, Options, Push, set_up
from torchweft.embedding.steps import Steps
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.extending import check_caller, check_types, present_workers
from torchweft.rpc import (
    Future,
    RRef,
    expose,
    functions,
    get_worker_info,
    rpc_async,
    rpc_sync,
)

_ASK_S = 5.0
Pushes = dict[str, dict[int, tuple[int, list[Part]]]]
"""By server and stack: the members that were looked up, and gradients of rows or of bags."""
Aggregate = Literal["host"] | Sequence[Sequence[str]] | None
Groups = tuple[tuple[str, ...], ...]
OfServer = tuple[Sequence[Push], Sequence[int]]
"""What a trainer pushes to one server: by stack, and the staleness of pulls to be counted."""


class Hosts:
    """Calls methods of the ``Host`` of a collection on several servers at the same time.

    Args:
        references: The hosts, by server.
        timeout_s: Limit of each call; 0 for none.
    """

    def __init__(self, references: Mapping[str, RRef[Host]], timeout_s: float) -> None:
        self.references = references
        self._waiting = {each: host.rpc_sync(timeout_s) for each, host in references.items()}
        self._starting = {each: host.rpc_async(timeout_s) for each, host in references.items()}

    def call(
        self,
        method: str,
        given: Mapping[str, tuple[Any, ...]],
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Returns the results of a method by server. Blocks until all calls have ended.

        Args:
            method: Name of the method.
            given: The arguments, by server.
            meanwhile: Is run here after the calls are sent.

        Raises:
            WorkerLost: An owner is lost.
            CallTimeout: An owner did not answer in time.
            Exception: The error of the first one that raised one, if neither is the case.
        """
        if len(given) == 1 and meanwhile is None:
            # A caller that waits in ``rpc_sync`` is woken sooner than a waiter on a future.
            ((server, args),) = given.items()
            return {server: getattr(self._waiting[server], method)(*args)}
        futures = self.start(method, given)
        if meanwhile is not None:
            meanwhile()
        return wait_for(futures)

    def start(self, method: str, given: Mapping[str, tuple[Any, ...]]) -> dict[str, Future[Any]]:
        """Returns futures of the results of a method by server."""
        return {
            server: getattr(self._starting[server], method)(*args) for server, args in given.items()
        }


def wait_for(futures: Mapping[str, Future[Any]], *, cancels_others: bool = True) -> dict[str, Any]:
    """Returns the results by name, and raises as ``Hosts.call``. Blocks until all have ended.

    Args:
        futures: The calls, by server.
        cancels_others: Whether the calls of the others are cancelled if a server is lost: one may
            wait for a trainer that has noticed the loss and makes no further step.
    """
    results: dict[str, Any] = {}
    errors: list[Exception] = []

    def end(done: Any) -> None:
        try:
            done.wait()
        except WorkerLost:
            for each in futures.values():
                each.cancel()
        except Exception:
            return  # Raised below.

    if cancels_others and len(futures) > 1:
        for future in futures.values():
            future.add_done_callback(end)
    for name, future in futures.items():
        try:
            results[name] = future.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise next(
            (each for each in errors if isinstance(each, (WorkerLost, CallTimeout))), errors[0]
        )
    return results


class Client:
    """Calls the servers of a collection, which it makes there if it is the first; not thread-safe.

    Args:
        name: Name of the collection.
        options: All that trainers and servers agree on.
        timeout_s: Limit of each call; 0 for none.

    Raises:
        TablesMismatch: Another trainer has made the collection with other options.
        StepError: An earlier step has failed on some of the servers.
    """

    def __init__(self, name: str, options: Options, timeout_s: float) -> None:
        me = get_worker_info().name
        self.name = name
        self.trainers = options.trainers
        self.staleness = options.staleness
        self.trainer = options.trainers.index(me) if me in options.trainers else -1
        """This worker's position among the trainers; -1 if it is none."""
        self.timeout_s = timeout_s
        self.servers = {each: get_worker_info(each) for each in options.layout.servers}
        self._pusher, group = next(
            ((number, each) for number, each in enumerate(options.pushers) if me in each), (-1, ())
        )
        self._member = group.index(me) if len(group) > 1 else -1
        self._aggregator: RRef[Any] | None = None
        self._hosts = Hosts({}, timeout_s)
        self._uncounted: dict[str, list[int]] = {}
        self._failure: BaseException | None = None
        futures = {
            each: rpc_async(info, set_up, (name, options), timeout=self.timeout_s)
            for each, info in self.servers.items()
        }
        try:
            answers = wait_for(futures)
            hosts = {each: host for each, (host, _) in answers.items()}
            self._hosts = Hosts(hosts, timeout_s)
            self.step = self._begin({each: steps for each, (_, steps) in answers.items()})
            """The step that this trainer is in."""
            if len(group) > 1 and answers:
                given = (name, options, self._pusher, self.step, hosts, timeout_s)
                self._aggregator, steps = rpc_sync(group[0], join, given, timeout=timeout_s)
                self.step = int(steps[self._member])
        except BaseException:
            # No server keeps a use that nobody will end.
            self._hosts = Hosts({}, timeout_s)
            for future in futures.values():
                with contextlib.suppress(Exception):
                    if future.done():
                        future.wait()[0].rpc_sync(self.timeout_s).close()
            raise

    def _begin(self, steps: Mapping[str, Sequence[int]]) -> int:
        """Returns this trainer's step, given those of all pushers on each server."""
        if self.trainer < 0:
            return 0
        own = {each: of_server[self._pusher] for each, of_server in steps.items()}
        if len(set(own.values())) > 1:
            raise StepError(
                f"the servers of {self.name!r} are at different steps of this trainer: {own}; an "
                "earlier step failed on some of them, so make the tables again, or restore them"
            )
        return int(next(iter(own.values()), 0))

    def check_begin(self) -> None:
        """Checks that this trainer has made no step yet; in the asynchronous mode it may have.

        Raises:
            StepError: It has.
        """
        if self.is_bounded and self.step:
            raise StepError(
                f"this worker has made {self.step} steps of tables {self.name!r} before, and some "
                "worker has not closed them, so they would go on with those rows and that state; "
                "close them on all workers and wait for that, or pass another name",
                server=", ".join(self.servers),
                step=0,
                expected=self.step,
            )

    @property
    def is_aggregated(self) -> bool:
        """Whether another trainer, or this one, pulls and pushes for a group of trainers."""
        return self._aggregator is not None

    @property
    def is_open(self) -> bool:
        """Whether this worker has not ended its use of the collection."""
        return bool(self._hosts.references)

    @property
    def is_bounded(self) -> bool:
        """Whether this worker trains, with a bound of the staleness."""
        return self.trainer >= 0 and self.staleness is not None

    # Calls

    def call(
        self,
        method: str,
        given: Mapping[str, tuple[Any, ...]],
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Calls a method of ``Host`` on servers, with arguments for each; see ``Hosts``."""
        return self._opened().call(method, given, meanwhile)

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Calls a method of ``Host`` on all servers; blocks."""
        return self.call(method, dict.fromkeys(self.servers, args))

    def _opened(self) -> Hosts:
        if self.servers and not self.is_open:
            raise ConfigurationError(
                f"tables {self.name!r} are closed on this worker, which has no rows of them; make "
                "them again"
            )
        return self._hosts

    def pull(
        self, requests: Mapping[str, Any], meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Pulls for this trainer's step; each server counts its staleness. Blocks.

        ``meanwhile`` may be run here while the servers work; it may be left out.
        """
        if self._aggregator is not None and requests:
            proxy = self._aggregator.rpc_sync(self.timeout_s)
            found: dict[str, Any] = proxy.pull(self._member, self.step, requests)
            return found
        return self.call("pull", self._given(requests, self._pusher), meanwhile)

    def pull_again(self, requests: Mapping[str, Any]) -> dict[str, Any]:
        """Pulls from the servers themselves what has changed of rows that are here. Blocks."""
        return self.call("pull", self._given(requests, self._pusher))

    def start_pull(self, requests: Mapping[str, Any]) -> dict[str, Future[Any]]:
        """Sends a pull for a later step; servers do not count it."""
        # Not as a pull of this step: the server may see it after the push of the step.
        given = self._given(requests, NO_TRAINER)
        return self._opened().start("pull", given)

    def _given(self, requests: Mapping[str, Any], trainer: int) -> dict[str, tuple[Any, ...]]:
        return {each: (trainer, self.step, own) for each, own in requests.items()}

    def note_staleness(self, name: str, steps: int) -> None:
        """Has a server count the staleness of rows of it that were used without a counted pull."""
        self._uncounted.setdefault(name, []).append(steps)

    def push(self, lr: float, seen: int, pushes: Pushes) -> dict[str, int]:
        """Pushes the gradients of this trainer's step; blocks until it may go on.

        Args:
            lr: The learning rate.
            seen: The oldest version of the rows of this step.
            pushes: The gradients.

        Returns:
            The version of each server that allowed it.

        Raises:
            CallTimeout: Other trainers have not made this step in time; names them.
            WorkerLost: A server, or a trainer that this step waits for, is lost.
            StepError: An earlier step has failed; nothing was sent.
        """
        if self._failure is not None:
            self._refuse(self._failure)
        given = {
            each: (
                [(stack, *of_stack) for stack, of_stack in pushes.get(each, {}).items()],
                self._uncounted.pop(each, []),
            )
            for each in self.servers
        }
        try:
            if self._aggregator is not None:
                proxy: Any = self._aggregator.rpc_sync(self.timeout_s)
                versions: dict[str, int] = proxy.push(self._member, self.step, lr, seen, given)
            else:
                calls = {
                    each: (self._pusher, self.step, lr, seen, *own) for each, own in given.items()
                }
                versions = self.call("push", calls)
        except BaseException as error:
            # Some servers may have taken the step: with the next one, rows would differ.
            self._failure = error
            if isinstance(error, CallTimeout):
                raise self._explained(error) from error
            raise
        self.step += 1
        return versions

    def _refuse(self, failure: BaseException) -> NoReturn:
        if isinstance(failure, WorkerLost):
            raise copy.copy(failure)
        raise StepError(
            f"step {self.step} of tables {self.name!r} has failed before, perhaps on some of the "
            f"servers {', '.join(self.servers)} only: {failure}. Nothing was sent; make the tables "
            "again, and restore a snapshot if some have taken it",
            server=", ".join(self.servers),
            step=self.step,
            expected=self.step,
        ) from failure

    def _explained(self, error: CallTimeout) -> CallTimeout:
        """Returns the error with the names of the trainers that were waited for."""
        late: list[str] = []
        if self._aggregator is not None:
            late = self._aggregator.rpc_sync(_ASK_S).missing()
        if not late:
            hosts = self._hosts.references
            host = hosts.get(error.worker) or next(iter(hosts.values()))
            late = host.rpc_sync(_ASK_S).missing()
        if not late:
            return error
        names = ", ".join(map(repr, late))
        return CallTimeout(
            f"step {self.step} of tables {self.name!r} waits for the trainers {names}: {error}",
            worker=error.worker,
            call=error.call,
            elapsed_s=error.elapsed_s,
        )

    def close(self) -> None:
        """Ends this worker's use of the collection; blocks."""
        hosts, self._hosts = self._hosts, Hosts({}, self.timeout_s)
        aggregator, self._aggregator = self._aggregator, None
        try:
            closing = hosts.start("close", dict.fromkeys(hosts.references, ()))
            wait_for(closing, cancels_others=False)
        finally:
            if aggregator is not None:
                aggregator.rpc_sync(self.timeout_s).close()


# Groups of trainers


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
        self._hosts = Hosts(hosts, timeout_s)
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
        for server in self._hosts.references:
            by_stack: dict[int, tuple[int, list[Part]]] = {}
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
        return self._hosts.call(method, calls)


def fewest(parts: Sequence[Part]) -> Sequence[Part]:
    """Returns gradients of the same rows, summed by row unless that takes more bytes."""
    if len(parts) < 2:
        return parts
    summed = sum_rows(parts)
    if all(len(part) == 2 for part in parts) or _size(summed) < sum(map(_size, parts)):
        return [summed]
    rows = [part for part in parts if len(part) == 2]
    return [*([sum_rows(rows)] if rows else []), *(part for part in parts if len(part) > 2)]


def _size(part: Part) -> int:
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
