"""The backward pass across workers: discover what is live, run, end.

The problem: a worker must run a node of its graph only when all gradients of that node are
there, but it cannot know by itself which of the messages it sent will be answered with
gradients: the receiver may not have used them. So the worker that called backward, the driver,
has the live messages found first, and then says RUN; from there on gradients flow without it.

Rules of the file: a ``Driver`` and the ``Participant`` on its own worker talk through messages
like any others. Events go in by method, actions come out as a list and are carried out in
order. Messages may come late, twice, and in any order: an event that a state does not expect is
without effect, except what a sound peer cannot have sent. A machine that has ended stays ended.
Machines are not thread-safe.

Guarantees, assumptions and flows: ``docs/protocols/autograd.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from weft.errors import AutogradError

Frontier = Mapping[int, Sequence[int]]
"""Messages that were reached at their receiver, by the worker that sent them."""


class PassKey(NamedTuple):
    """Names a backward pass; ``pass_id`` alone is unique in the group (``weft.ids.scoped_id``)."""

    context_id: int
    pass_id: int


# What is sent. Every message of a pass names it.


@dataclass(slots=True)
class Discover:
    """Asks a worker to walk from messages that it sent."""

    key: PassKey
    round: int
    message_ids: tuple[int, ...]


@dataclass(slots=True)
class Reached:
    """Answers ``Discover`` of the same round with what the walk reached for the first time."""

    key: PassKey
    round: int
    frontier: dict[int, tuple[int, ...]]


@dataclass(slots=True)
class Run:
    """Tells a worker that it knows all its live sends; ``fast``: that all are live."""

    key: PassKey
    fast: bool
    retain_graph: bool


@dataclass(slots=True)
class Started:
    """Answers a fast ``Run`` with the workers that this one knows in the context."""

    key: PassKey
    known_workers: tuple[int, ...]


@dataclass(slots=True)
class Gradients:
    """Carries the gradients of a received message to its sender; opaque to the protocol."""

    key: PassKey
    message_id: int
    gradients: object


@dataclass(slots=True)
class Done:
    """Tells the driver that all live sends of a worker have run."""

    key: PassKey


@dataclass(slots=True)
class Failed:
    """Tells the driver that the pass cannot go on, and where and why."""

    key: PassKey
    worker: int
    operation: str
    error: object


@dataclass(slots=True)
class Abort:
    """Tells a participant to drop the pass."""

    key: PassKey


Message = Discover | Reached | Run | Started | Gradients | Done | Failed | Abort


# What a shell is asked to do.


@dataclass(slots=True)
class Send:
    """Send ``message`` to ``to_worker``, which may be this worker itself."""

    to_worker: int
    message: Message


@dataclass(slots=True)
class Walk:
    """Walk from these sends, then call ``Participant.walked`` with what was reached."""

    round: int
    message_ids: tuple[int, ...]


@dataclass(slots=True)
class Start:
    """Start running, then call ``Participant.executed``."""

    fast: bool
    retain_graph: bool


@dataclass(slots=True)
class Execute:
    """Take the gradients of these messages, run what is ready, call ``Participant.executed``."""

    arrived: list[tuple[int, object]]


@dataclass(slots=True)
class Close:
    """The pass is over on this worker: let go of its memory, remember its number as ended."""


@dataclass(slots=True)
class Complete:
    """The pass is over everywhere: wake the caller of backward."""


@dataclass(slots=True)
class Fail:
    """The pass has failed: raise ``failure_error`` in the caller of backward."""

    worker: int
    operation: str
    error: object


Action = Send | Walk | Start | Execute | Close | Complete | Fail


def failure_error(fail: Fail, worker_name: str) -> AutogradError:
    """Makes the error that the caller of backward gets, with its cause if that is an exception."""
    error = AutogradError(
        f"backward failed on worker {worker_name!r} in {fail.operation}: {fail.error}",
        worker=worker_name,
        operation=fail.operation,
    )
    if isinstance(fail.error, BaseException):
        error.__cause__ = fail.error
    return error


@dataclass(slots=True)
class _Peer:
    """What the driver knows of one participant."""

    unasked: list[int] = field(default_factory=list)
    open_round: int | None = None
    is_started: bool = False
    is_done: bool = False


class Driver:
    """Leads one pass, on the worker that called backward.

    Args:
        key: Names the pass.
        worker: This worker, which takes part too.
        retain_graph: Whether graphs must survive for another pass.
    """

    def __init__(self, key: PassKey, worker: int, retain_graph: bool = False) -> None:
        self.key = key
        self.worker = worker
        self._retain_graph = retain_graph
        self._is_fast = False
        self._is_running = False
        self._is_over = False
        self._round = 0
        self._asked: set[int] = set()
        self._peers: dict[int, _Peer] = {worker: _Peer()}
        self._handlers: dict[type, Callable[[int, Any], list[Action]]] = {
            Reached: self._reached,
            Started: self._started,
            Done: self._done,
            Failed: self._failed,
        }

    @property
    def participants(self) -> list[int]:
        """The workers that take part as far as is known; the loss of one of them ends the pass."""
        return list(self._peers)

    @property
    def is_over(self) -> bool:
        """Whether ``Complete`` or ``Fail`` has been returned."""
        return self._is_over

    def start(self, frontier: Frontier) -> list[Action]:
        """Starts a pass with what the walk from the roots reached."""
        return self._ask(frontier)

    def start_fast(self, known_workers: Iterable[int]) -> list[Action]:
        """Starts a pass without discovery at the workers known to the context here."""
        self._is_fast = self._is_running = True
        return self._run([self.worker, *known_workers])

    def receive(self, source: int, message: Message) -> list[Action]:
        """Takes a message that is for the driver of the pass."""
        handle = self._handlers.get(type(message))
        if handle is None or self._is_over or source not in self._peers:
            return []
        return handle(source, message)

    def worker_lost(self, worker: int, error: object) -> list[Action]:
        """Ends the pass if a worker that takes part can no longer be reached."""
        if self._is_over or worker not in self._peers:
            return []
        del self._peers[worker]
        return self._fail(worker, "its connection", error)

    def cancel(self, error: object) -> list[Action]:
        """Ends the pass because its caller gives it up."""
        return [] if self._is_over else self._fail(self.worker, "waiting for the pass", error)

    def _ask(self, frontier: Frontier) -> list[Action]:
        for worker, message_ids in frontier.items():
            new = [message_id for message_id in message_ids if message_id not in self._asked]
            self._asked.update(new)
            self._peers.setdefault(worker, _Peer()).unasked += new
        actions: list[Action] = []
        for worker, peer in self._peers.items():
            # While a question is open the next one grows: fewer, larger messages.
            if peer.unasked and peer.open_round is None:
                actions.append(Send(worker, self._question(peer)))
        if all(peer.open_round is None for peer in self._peers.values()):
            self._is_running = True
            return self._run(self._peers)
        return actions

    def _question(self, peer: _Peer) -> Discover:
        self._round += 1
        peer.open_round = self._round
        message_ids, peer.unasked = tuple(peer.unasked), []
        return Discover(self.key, self._round, message_ids)

    def _run(self, workers: Iterable[int]) -> list[Action]:
        told: dict[int, Action] = {}
        for worker in workers:
            self._peers.setdefault(worker, _Peer())
            told[worker] = Send(worker, Run(self.key, self._is_fast, self._retain_graph))
        return list(told.values())

    def _reached(self, source: int, message: Reached) -> list[Action]:
        peer = self._peers[source]
        if peer.open_round != message.round:
            return []
        peer.open_round = None
        return self._ask(message.frontier)

    def _started(self, source: int, message: Started) -> list[Action]:
        peer = self._peers[source]
        if not self._is_fast or peer.is_started:
            return []
        peer.is_started = True
        new = [worker for worker in message.known_workers if worker not in self._peers]
        return self._run(new) + self._completed()

    def _done(self, source: int, _: Done) -> list[Action]:
        self._peers[source].is_done = True
        return self._completed()

    def _completed(self) -> list[Action]:
        peers = self._peers.values()
        if not self._is_running or not all(peer.is_done for peer in peers):
            return []
        if self._is_fast and not all(peer.is_started for peer in peers):
            return []
        self._is_over = True
        return [Complete()]

    def _failed(self, _: int, message: Failed) -> list[Action]:
        return self._fail(message.worker, message.operation, message.error)

    def _fail(self, worker: int, operation: str, error: object) -> list[Action]:
        self._is_over = True
        aborts: list[Action] = [Send(peer, Abort(self.key)) for peer in self._peers]
        return [*aborts, Fail(worker, operation, error)]


class Phase(Enum):
    """Where a participant is in a pass."""

    DISCOVERING = auto()
    RUNNING = auto()
    DONE = auto()
    ABORTED = auto()


_OVER = (Phase.DONE, Phase.ABORTED)


class Participant:
    """Takes part in one pass, on any worker; made by the first message of a pass that comes.

    Args:
        key: Names the pass.
        worker: This worker.
        driver: The worker that called backward, ``weft.ids.worker_of(key.pass_id)``.
        known_workers: Those that this worker knows in the context, for a fast pass.
    """

    def __init__(
        self, key: PassKey, worker: int, driver: int, known_workers: Iterable[int] = ()
    ) -> None:
        self.key = key
        self.worker = worker
        self.driver = driver
        self._known_workers = tuple(known_workers)
        self._phase = Phase.DISCOVERING
        self._walking: set[int] = set()
        self._answers: dict[int, Reached] = {}
        self._seen: set[int] = set()
        self._early: list[tuple[int, object]] = []
        self._handlers: dict[type, Callable[[Any], list[Action]]] = {
            Discover: self._discover,
            Run: self._run,
            Gradients: self._gradients,
            Abort: self._abort,
        }

    @property
    def phase(self) -> Phase:
        """Where the pass is here."""
        return self._phase

    def receive(self, source: int, message: Message) -> list[Action]:
        """Takes a message that is for a participant of the pass."""
        handle = self._handlers.get(type(message))
        if handle is None or self._phase in _OVER:
            return []
        if source != self.driver and not isinstance(message, Gradients):
            return []
        return handle(message)

    def walked(self, round: int, frontier: Frontier) -> list[Action]:
        """Takes what the walk reached that ``Walk`` asked for."""
        if self._phase in _OVER or round not in self._walking:
            return []
        self._walking.remove(round)
        reached = {worker: tuple(ids) for worker, ids in frontier.items()}
        self._answers[round] = Reached(self.key, round, reached)
        return [Send(self.driver, self._answers[round])]

    def executed(self, outgoing: Iterable[tuple[int, int, object]], is_done: bool) -> list[Action]:
        """Takes the outcome of ``Start`` or ``Execute``.

        Args:
            outgoing: Gradients to send: to which worker, of which message, and what.
            is_done: Whether all live sends of this worker have run.
        """
        if self._phase not in (Phase.RUNNING, Phase.DONE):
            return []
        # Also when done: another thread may have seen that nothing is left and said so first.
        actions: list[Action] = [
            Send(worker, Gradients(self.key, message_id, gradients))
            for worker, message_id, gradients in outgoing
        ]
        if is_done and self._phase is Phase.RUNNING:
            actions.append(Send(self.driver, Done(self.key)))
            actions += self._end(Phase.DONE)
        return actions

    def failed(self, operation: str, error: object) -> list[Action]:
        """Takes an error of ``Walk``, ``Start`` or ``Execute``, or of sending something."""
        # Also when done: what failed may be the sending of the last gradients.
        if self._phase is Phase.ABORTED:
            return []
        message = Failed(self.key, self.worker, operation, error)
        return [Send(self.driver, message), *self._end(Phase.ABORTED)]

    def worker_lost(self, worker: int) -> list[Action]:
        """Drops the pass if its driver is lost; of others the driver hears itself."""
        return self._end(Phase.ABORTED) if worker == self.driver else []

    def _discover(self, message: Discover) -> list[Action]:
        if message.round in self._answers:
            return [Send(self.driver, self._answers[message.round])]
        if self._phase is not Phase.DISCOVERING or message.round in self._walking:
            return []
        self._walking.add(message.round)
        return [Walk(message.round, message.message_ids)]

    def _run(self, message: Run) -> list[Action]:
        if self._phase is not Phase.DISCOVERING:
            return []
        self._phase = Phase.RUNNING
        actions: list[Action] = [Start(message.fast, message.retain_graph)]
        if message.fast:
            # First, so that workers which only this one knows start as early as can be.
            actions.insert(0, Send(self.driver, Started(self.key, self._known_workers)))
        if self._early:
            actions.append(Execute(self._early))
            self._early = []
        return actions

    def _gradients(self, message: Gradients) -> list[Action]:
        if message.message_id in self._seen:
            return []
        self._seen.add(message.message_id)
        if self._phase is Phase.DISCOVERING:
            self._early.append((message.message_id, message.gradients))
            return []
        return [Execute([(message.message_id, message.gradients)])]

    def _abort(self, _: Abort) -> list[Action]:
        return self._end(Phase.ABORTED)

    def _end(self, phase: Phase) -> list[Action]:
        if self._phase in _OVER:
            return []
        self._phase = phase
        self._early = []
        return [Close()]
