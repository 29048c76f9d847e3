"""A worker's side of a collection: its step, and its calls to the servers."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torchweft.embedding import aggregator, host
from torchweft.embedding.calls import call_servers, start_calls, wait_for
from torchweft.embedding.errors import StepError
from torchweft.embedding.optimizer import Pushes
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.rpc import Future, RRef, get_worker_info, rpc_sync
from torchweft.rpc.health import info_of

_ASK_S = 5.0


class Client:
    """Calls the servers of a collection, which it makes there if it is the first; not thread-safe.

    Args:
        name: Name of the collection.
        options: All that trainers and servers agree on.
        limit_s: Limit of each call; infinite for none.

    Raises:
        TablesMismatch: Another trainer has made the collection with other options.
        StepError: An earlier step has failed on some of the servers.
    """

    def __init__(self, name: str, options: host.Options, limit_s: float) -> None:
        me = get_worker_info().name
        self.name = name
        self.staleness = options.staleness
        self.trainer = options.trainers.index(me) if me in options.trainers else -1
        """This worker's position among the trainers; -1 if it is none."""
        self._pusher = options.pusher_of(me)
        group = options.pushers[self._pusher] if self._pusher >= 0 else ()
        self._member = group.index(me) if len(group) > 1 else -1
        self._aggregator = get_worker_info(group[0]) if len(group) > 1 else None
        self.timeout_s = 0.0 if math.isinf(limit_s) else limit_s
        self.servers = {server: get_worker_info(server) for server in options.layout.servers}
        self._uncounted: dict[str, list[int]] = {}
        self._hosts: list[RRef[Any]] = []
        self._lives: list[int] = []
        self._failure: BaseException | None = None
        self.step = self._set_up(options)
        """The step that this trainer is in."""

    def _set_up(self, options: host.Options) -> int:
        """Makes the collection on all servers, or uses it there; returns this trainer's step."""
        calls = dict.fromkeys(self.servers.values(), (self.name, options))
        futures = start_calls(host.set_up, calls, self.timeout_s)
        try:
            answers = wait_for(futures)
            self._hosts = [reference for reference, _ in answers.values()]
            self._lives = [reference.id.owner for reference in self._hosts]
            return self._joined(options, answers)
        except BaseException:
            # No server keeps a use that nobody will end.
            self._hosts.clear()
            for server, future in futures.items():
                with contextlib.suppress(Exception):
                    if future.done() and future.wait():
                        self.call(server, host.close)
            raise

    def _joined(self, options: host.Options, answers: Mapping[str, Any]) -> int:
        if self.trainer < 0:
            return 0
        steps = {server: steps[self._pusher] for server, (_, steps) in answers.items()}
        if len(set(steps.values())) > 1:
            raise StepError(
                f"the servers of {self.name!r} are at different steps of this trainer: {steps}; an "
                "earlier step failed on some of them, so make the tables again, or restore them"
            )
        step = int(next(iter(steps.values()), 0))
        if self._aggregator is None or not steps:
            return step
        given = (options, self._pusher, step, self.timeout_s)
        reference, of_members = self._ask(aggregator.join, *given)
        self._hosts.append(reference)
        return int(of_members[self._member])

    def _ask(self, function: Any, *args: Any) -> Any:
        """Calls a function on the aggregator with the name of the collection; blocks."""
        assert self._aggregator is not None
        return rpc_sync(self._aggregator, function, (self.name, *args), timeout=self.timeout_s)

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

    def call_all(self, function: Any, *args: Any) -> dict[str, Any]:
        """Calls a function on all servers with the name of the collection; blocks."""
        given = dict.fromkeys(self.servers.values(), (self.name, *args))
        with self._blaming_the_lost():
            return call_servers(function, given, self.timeout_s) if given else {}

    def call(self, server: str, function: Any, *args: Any) -> Any:
        """Calls a function on one server with the name of the collection; blocks."""
        given = (self.name, *args)
        with self._blaming_the_lost():
            return rpc_sync(self.servers[server], function, given, timeout=self.timeout_s)

    @contextlib.contextmanager
    def _blaming_the_lost(self) -> Iterator[None]:
        """Raises WorkerLost in place of an error that another life of a lost server has raised.

        A server that has come back under its name has no tables, which is no mistake of a program.
        """
        try:
            yield
        except ConfigurationError as error:
            try:
                for worker in self._lives:
                    info_of(worker)
            except WorkerLost as lost:
                raise lost from error
            raise

    def pull(
        self, requests: Mapping[str, Any], meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Pulls for this trainer's step; each server counts its staleness. Blocks.

        ``meanwhile`` may be run here while the servers work; it may be left out.
        """
        if not requests:
            return {}
        if self._aggregator is not None:
            found: dict[str, Any] = self._ask(aggregator.pull, self._member, self.step, requests)
            return found
        given = self._given(requests, self._pusher)
        with self._blaming_the_lost():
            return call_servers(host.pull, given, self.timeout_s, meanwhile)

    def refresh(self, requests: Mapping[str, Any]) -> dict[str, Any]:
        """Pulls for this trainer's step what has changed of rows that are here. Blocks.

        Args:
            requests: As for a pull, with the version of the rows.
        """
        with self._blaming_the_lost():
            return call_servers(host.refresh, self._given(requests, self._pusher), self.timeout_s)

    def start_pull(self, requests: Mapping[str, Any]) -> dict[str, Future[Any]]:
        """Sends a pull for a later step; servers do not count it."""
        # Not as a pull of this step: the server may see it after the push of the step.
        return start_calls(host.pull, self._given(requests, host.NO_TRAINER), self.timeout_s)

    def _given(
        self, requests: Mapping[str, Any], trainer: int
    ) -> dict[WorkerInfo, tuple[Any, ...]]:
        return {
            self.servers[server]: (self.name, trainer, self.step, of_server)
            for server, of_server in requests.items()
        }

    @property
    def is_bounded(self) -> bool:
        """Whether this worker trains, with a bound of the staleness."""
        return self.trainer >= 0 and self.staleness is not None

    def note_staleness(self, server: str, steps: int) -> None:
        """Has a server count the staleness of rows of it that were used without a counted pull."""
        self._uncounted.setdefault(server, []).append(steps)

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
            server: (
                [(stack, *of_stack) for stack, of_stack in pushes.get(server, {}).items()],
                self._uncounted.pop(server, []),
            )
            for server in self.servers
        }
        try:
            versions = self._push(lr, seen, given)
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

    def _push(
        self, lr: float, seen: int, given: Mapping[str, aggregator.OfServer]
    ) -> dict[str, int]:
        if not given:
            return {}
        if self._aggregator is not None:
            versions: dict[str, int]
            versions = self._ask(aggregator.push, self._member, self.step, lr, seen, given)
            return versions
        calls = {
            self.servers[server]: (self.name, self._pusher, self.step, lr, seen, *of_server)
            for server, of_server in given.items()
        }
        with self._blaming_the_lost():
            return call_servers(host.push, calls, self.timeout_s)

    def _explained(self, error: CallTimeout) -> CallTimeout:
        """Returns the error with the names of the trainers that were waited for."""
        late: list[str] = []
        if self._aggregator is not None:
            late = rpc_sync(self._aggregator, aggregator.missing, (self.name,), timeout=_ASK_S)
        server = self.servers.get(error.worker, next(iter(self.servers.values())))
        if not late:
            late = rpc_sync(server, host.missing, args=(self.name,), timeout=_ASK_S)
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
        hosts, self._hosts = self._hosts, []
        if not hosts:
            return
        try:
            self.call_all(host.close)
        finally:
            if self._aggregator is not None:
                self._ask(aggregator.leave)
