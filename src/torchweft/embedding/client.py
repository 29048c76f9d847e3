"""A worker's side of a collection: its step, and its calls to the servers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torchweft.embedding import server
from torchweft.embedding.errors import StepError
from torchweft.embedding.groups import join
from torchweft.embedding.meeting import call_each, start_each, wait_for
from torchweft.embedding.rows import Part
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.rpc import Future, RRef, get_worker_info, rpc_async, rpc_sync

_ASK_S = 5.0
Pushes = dict[str, dict[int, tuple[int, list[Part]]]]
"""By server and stack: the members that were looked up, and gradients of rows or of bags."""


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

    def __init__(self, name: str, options: server.Options, timeout_s: float) -> None:
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
        self._hosts: dict[str, RRef[server.Host]] = {}
        self._uncounted: dict[str, list[int]] = {}
        self._failure: BaseException | None = None
        futures = {
            each: rpc_async(info, server.set_up, (name, options), timeout=self.timeout_s)
            for each, info in self.servers.items()
        }
        try:
            answers = wait_for(futures)
            self._hosts = {each: host for each, (host, _) in answers.items()}
            self.step = self._begin({each: steps for each, (_, steps) in answers.items()})
            """The step that this trainer is in."""
            if len(group) > 1 and answers:
                given = (name, options, self._pusher, self.step, self._hosts, self.timeout_s)
                self._aggregator, steps = rpc_sync(group[0], join, given, timeout=timeout_s)
                self.step = int(steps[self._member])
        except BaseException:
            # No server keeps a use that nobody will end.
            self._hosts.clear()
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
        return bool(self._hosts)

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
        """Calls a method of ``Host`` on servers, with arguments for each; see ``call_each``."""
        return call_each(self._opened(), method, given, self.timeout_s, meanwhile)

    def call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Calls a method of ``Host`` on all servers; blocks."""
        return self.call(method, dict.fromkeys(self.servers, args))

    def _opened(self) -> dict[str, RRef[server.Host]]:
        if self.servers and not self._hosts:
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
        given = self._given(requests, server.NO_TRAINER)
        return start_each(self._opened(), "pull", given, self.timeout_s)

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
            host = self._hosts.get(error.worker) or next(iter(self._hosts.values()))
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
        hosts, self._hosts = self._hosts, {}
        aggregator, self._aggregator = self._aggregator, None
        try:
            call_each(hosts, "close", dict.fromkeys(hosts, ()), self.timeout_s)
        finally:
            if aggregator is not None:
                aggregator.rpc_sync(self.timeout_s).close()
