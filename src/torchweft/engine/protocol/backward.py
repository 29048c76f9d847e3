"""The backward pass across workers: gradients go ahead, discovery runs only if they get stuck.

The problem: a worker must run a node of its graph only when all gradients of that node have
arrived. But it cannot know by itself which of its sent messages will be answered with gradients:
the receiver may not have used them. To find that out first would cost a round trip to every worker
on the way, before any node runs. So a worker runs the parts of its graph that are complete
whichever of its messages are used, and reports its progress with the gradients. The worker that
called backward, the driver, sums up the progress. Only if gradients stop moving before all have run
does the driver announce which messages are live, and in the end that no others are.

Rules of the file: events go in by method, actions come out as a list and are carried out in
order. Messages may come late, twice, and in any order: an event that a state does not expect has
no effect. A machine that has ended stays ended. Machines are not thread-safe.

Guarantees, assumptions and flows: ``docs/protocols/autograd.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchweft.errors import AutogradError, BackwardLost, ProtocolError, WorkerLost
from torchweft.ids import WORKER_SHIFT, worker_of

ROOTS = 0
"""Stands for the roots in place of a message number; no message has it."""

CONNECTION = "its connection"
"""The failed operation in errors about a lost worker."""


Parts = Mapping[int, int]
"""Some tensors of messages: by the message's number, a bit for each of its tensors."""

NO_PARTS: Parts = {}  # Never changed.


def _joined(first: Parts, second: Parts) -> Parts:
    both = dict(first)
    for message_id, bits in second.items():
        both[message_id] = both.get(message_id, 0) | bits
    return both


@dataclass(slots=True)
class Progress:
    """The progress of messages, by their numbers, on its way to the driver.

    Attributes:
        walked: Live messages from which their senders have walked. The messages that such a walk
            was the first to reach are in the same object, under ``answered`` or ``reached``.
        executed: Live messages whose gradients have run as far as they lead.
        answered: Messages that were reached and whose gradients have been sent.
        reached: Messages that were reached and whose gradients are not complete.
        walked_parts: The tensors of messages in ``walked`` of which not all are live, as bits.
        reached_parts: The tensors of messages in ``reached`` of which not all were reached.
    """

    walked: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    walked_parts: Parts = field(default_factory=dict)
    reached_parts: Parts = field(default_factory=dict)

    def add(self, other: Progress) -> None:
        """Adds the progress of another object."""
        self.walked += other.walked
        self.executed += other.executed
        self.answered += other.answered
        self.reached += other.reached
        if other.walked_parts or other.reached_parts:
            self.add_parts(other.walked_parts, other.reached_parts)

    def add_parts(self, walked: Parts, reached: Parts) -> None:
        """Adds the parts of messages that were walked from and reached."""
        if walked:
            self.walked_parts = _joined(self.walked_parts, walked)
        if reached:
            self.reached_parts = _joined(self.reached_parts, reached)

    def __bool__(self) -> bool:
        return bool(self.walked or self.executed or self.answered or self.reached)


# Messages.


@dataclass(slots=True)
class Gradients:
    """Carries the gradients of a received message to its sender; opaque to the protocol."""

    message_id: int
    gradients: Sequence[Any]
    progress: Progress | None = None


@dataclass(slots=True)
class Discover:
    """Tells a worker that messages that it sent are live.

    Attributes:
        message_ids: The messages.
        parts: The live tensors of those messages of which not all are live.
    """

    message_ids: tuple[int, ...]
    parts: Parts = field(default_factory=dict)


@dataclass(slots=True)
class Settled:
    """Tells a worker that it knows all its live messages."""


@dataclass(slots=True)
class Report:
    """Carries progress that travels with no gradients."""

    progress: Progress


@dataclass(slots=True)
class Failed:
    """Tells the driver that the pass failed, where and why."""

    worker: int
    operation: str
    error: object


@dataclass(slots=True)
class Abort:
    """Tells a participant to drop the pass."""


Message = Gradients | Discover | Settled | Report | Failed | Abort


# Actions of the shell.


class Send(NamedTuple):
    """Send ``message`` to ``to_worker``, which may be this worker itself."""

    to_worker: int
    message: Message


class Apply(NamedTuple):
    """Give gradients, or news of live messages, to the pass on this worker."""

    message: Gradients | Discover | Settled


class Tell(NamedTuple):
    """Give progress to the driver, which is on this worker."""

    progress: Progress


class Close(NamedTuple):
    """The pass is over on this worker: release its memory."""


class Complete(NamedTuple):
    """The pass is over everywhere: wake the caller of backward."""


class Fail(NamedTuple):
    """The pass has failed: raise ``failure_error`` in the caller of backward."""

    worker: int
    operation: str
    error: object


Action = Send | Apply | Tell | Close | Complete | Fail


def failure_error(fail: Fail, worker_name: str) -> AutogradError:
    """Makes the error that the caller of backward gets, with its cause if that is an exception."""
    message = (
        f"backward failed on worker {worker_name!r} in {fail.operation}: "
        f"Error on Node {fail.worker}: {fail.error}"
    )
    error = AutogradError(message, worker=worker_name, operation=fail.operation)
    if isinstance(fail.error, WorkerLost):
        error = BackwardLost(
            message,
            worker=fail.error.worker or worker_name,
            since=fail.error.since,
            cause=fail.error.cause,
            operation=fail.operation,
        )
    if isinstance(fail.error, BaseException):
        error.__cause__ = fail.error
    return error


class Driver:
    """Leads one pass, on the worker that called backward.

    Args:
        worker: This worker, which takes part too.
    """

    is_over = False
    _is_settled = False

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._walked: set[int] = set()
        self._executed: set[int] = set()
        # A message is announced once its gradients or a ``Discover`` were sent to its sender: a
        # message whose gradients were sent needs no ``Discover``.
        self._announced = {ROOTS}
        self._open = {ROOTS}  # reached, and not both walked and executed
        self._unwalked = {ROOTS}  # announced, and not walked
        self._unannounced: set[int] = set()  # reached, and neither announced nor walked
        self._told: set[int] = set()
        # The tensors of messages that were not reached as a whole: those reached, those announced
        # by a ``Discover``, and those from which their sender has walked.
        self._reached_parts: dict[int, int] = {}
        self._announced_parts: dict[int, int] = {}
        self._walked_parts: dict[int, int] = {}

    def progressed(self, progress: Progress) -> list[Action]:
        """Takes progress from any worker."""
        if self.is_over:
            return []
        walked, executed, answered = progress.walked, progress.executed, progress.answered
        # A pass has many messages, and each of them is in few notes: look at the new notes only.
        news = {*walked, *executed, *answered, *progress.reached}
        if self._reached_parts or progress.reached_parts or progress.walked_parts:
            walked = self._take_parts(progress)
        self._walked.update(walked)
        self._executed.update(executed)
        self._announced.update(answered)
        walked_news = news & self._walked
        self._open.update(answered, progress.reached)
        self._open -= walked_news & self._executed
        if not self._open:
            self.is_over = True
            return [Complete()]
        self._unwalked.update(answered)
        self._unwalked -= walked_news
        self._unannounced.update(progress.reached)
        if self._unannounced:
            self._unannounced.difference_update(walked_news, news & self._announced)
        if self._unwalked:
            return []  # Gradients, a discovery, or progress is on its way.
        return self._discover() if self._unannounced else self._settle()

    def _take_parts(self, progress: Progress) -> list[int]:
        """Takes the parts in ``progress``; returns the messages that were walked from as a whole.

        More tensors of a message may be reached after it was announced, and even walked from. It
        is then announced again.
        """
        parts, whole = progress.walked_parts, []
        for message_id in progress.walked:
            bits = parts.get(message_id)
            if bits is None:
                whole.append(message_id)
                self._walked_parts.pop(message_id, None)
            elif message_id in self._walked_parts or message_id not in self._walked:
                self._walked_parts[message_id] = self._walked_parts.get(message_id, 0) | bits
        for message_id, bits in progress.reached_parts.items():
            self._reached_parts[message_id] = self._reached_parts.get(message_id, 0) | bits
        for message_id in parts.keys() | progress.reached_parts.keys():
            walked = self._walked_parts.get(message_id)
            if walked is None and message_id in self._walked:
                continue  # As a whole.
            reached, announced = (
                each.get(message_id, 0) for each in (self._reached_parts, self._announced_parts)
            )
            if walked is not None and not announced & ~walked:
                self._unwalked.discard(message_id)
            if walked is not None and not reached & ~walked:
                self._walked.add(message_id)
            elif announced and reached & ~announced and message_id not in whole:
                self._walked.discard(message_id)
                self._announced.discard(message_id)
                self._open.add(message_id)
                self._unannounced.add(message_id)
        return whole

    def _discover(self) -> list[Action]:
        by_sender: dict[int, list[int]] = {}
        for message_id in sorted(self._unannounced):
            by_sender.setdefault(worker_of(message_id), []).append(message_id)
        self._announced |= self._unannounced
        self._unwalked |= self._unannounced
        self._unannounced.clear()
        self._told.update(by_sender)
        return [Send(worker, self._announcement(ids)) for worker, ids in by_sender.items()]

    def _announcement(self, message_ids: Sequence[int]) -> Discover:
        reached = self._reached_parts
        if not reached:
            return Discover(tuple(message_ids))
        parts = {number: reached[number] for number in message_ids if number in reached}
        self._announced_parts.update(parts)
        return Discover(tuple(message_ids), parts)

    def _settle(self) -> list[Action]:
        # All reached messages have been walked: no further message becomes live.
        if self._is_settled:
            return []
        self._is_settled = True
        waiting = self.awaited_workers()
        self._told.update(waiting)
        return [Send(worker, Settled()) for worker in sorted(waiting)]

    def awaited_workers(self) -> set[int]:
        """Returns the workers from which progress is still missing; may run on any thread."""
        return {
            self.worker if message_id == ROOTS else worker_of(message_id)
            for message_id in self._open.copy()
        }

    def failed(self, message: Failed) -> list[Action]:
        """Takes a failure from any worker."""
        return self._fail(Fail(message.worker, message.operation, message.error))

    def worker_lost(self, worker: int, error: object) -> list[Action]:
        """Ends the pass if it waits for a worker that can no longer be reached."""
        is_awaited = not self.is_over and worker in self.awaited_workers()
        return self._fail(Fail(worker, CONNECTION, error)) if is_awaited else []

    def cancel(self, error: object) -> list[Action]:
        """Ends the pass, because its caller gives it up."""
        return self._fail(Fail(self.worker, "waiting for the pass", error))

    def _fail(self, fail: Fail) -> list[Action]:
        if self.is_over:
            return []
        self.is_over = True
        # Participants, including this worker's own, pass the abort on to all their partners.
        told = sorted(self._told | {self.worker})
        return [*(Send(worker, Abort()) for worker in told), fail]


class Participant:
    """Takes part in one pass, on any worker; created by the first message of the pass.

    Progress of this worker and of others travels with gradients that are sent anyway, preferably to
    the driver. If no gradients are sent, it goes to the *parent*: the worker from which the first
    message of the pass came. So the driver hears only from workers to which it sent a message
    itself, unless the pass fails.

    Args:
        worker: This worker.
        driver: The worker that called backward.
    """

    is_over = False
    _carried: Progress | None = None

    def __init__(self, worker: int, driver: int) -> None:
        self.worker = worker
        self.driver = driver
        self._parent: int | None = worker if worker == driver else None
        self._partners: set[int] = set()
        self._taken: set[int] = set()

    def receive(self, source: int, message: Message) -> list[Action]:
        """Takes a message for a participant; ``worked`` must follow after one or several.

        Returns:
            An ``Apply`` alone, or other actions.
        """
        if self.is_over:
            return []
        if isinstance(message, Abort):
            return self._abort() if source in (self.driver, *self._partners) else []
        is_told = self.worker == self.driver or source in self._partners
        if isinstance(message, Report) and not is_told:
            return []  # Only a worker that was sent a message of the pass has its parent here.
        if self._parent is None:
            self._parent = source
        self._partners.add(source)
        if isinstance(message, Gradients):
            if message.message_id in self._taken:
                return []
            self._taken.add(message.message_id)
            if message.progress is not None:
                self._carry(message.progress)
            return [Apply(message)]
        if isinstance(message, Report):
            self._carry(message.progress)
        elif isinstance(message, (Discover, Settled)) and source == self.driver:
            return [Apply(message)]
        return []

    def _carry(self, progress: Progress) -> None:
        if self._carried is None:
            self._carried = progress
        else:
            self._carried.add(progress)

    def worked(
        self, outgoing: Iterable[tuple[int, int, Sequence[Any]]], progress: Progress
    ) -> list[Action]:
        """Takes the results of this worker for all messages received since the last call.

        Args:
            outgoing: Gradients to send, as triples of worker, message number and gradients.
            progress: The resulting progress of messages.
        """
        if self.is_over:
            return []
        carried, self._carried = self._carried, None
        if carried is not None:
            progress.add(carried)
        actions: list[Action] = []
        for worker, number, gradients in outgoing:
            self._partners.add(worker)
            actions.append(Send(worker, Gradients(number, gradients)))
        if progress:
            if self.worker == self.driver:
                actions.append(Tell(progress))
            elif actions:
                self._attach(progress, actions)
            else:
                assert self._parent is not None
                actions.append(Send(self._parent, Report(progress)))
        return actions

    def _attach(self, progress: Progress, sends: Sequence[Any]) -> None:
        """Attaches progress to the last gradients to the driver, or else to any worker."""
        message = sends[-1].message
        for send in sends:
            if send.to_worker == self.driver:
                message = send.message
        message.progress = progress

    def failed(self, operation: str, error: object) -> list[Action]:
        """Takes an error of this worker's work, or of sending."""
        return self._fail(Failed(self.worker, operation, error))

    def worker_lost(self, worker: int, error: object) -> list[Action]:
        """Ends the pass if the lost worker leads it, or exchanged its messages with this worker."""
        if worker == self.driver:
            return [] if self.is_over else self._abort()
        if worker in self._partners:
            return self._fail(Failed(worker, CONNECTION, error))
        return []

    def _fail(self, failed: Failed) -> list[Action]:
        return [] if self.is_over else [Send(self.driver, failed), *self._abort()]

    def _abort(self) -> list[Action]:
        self.is_over = True
        self._carried = None
        others = sorted(self._partners - {self.worker, self.driver})
        return [*(Send(worker, Abort()) for worker in others), Close()]


# What a worker may say about a pass, and about messages, to others.
#
# Members share a secret, not their aims. Backward passes concern workers that do not know each
# other, so that nobody can check who takes part. Their numbers are therefore secrets: half of the
# number of a context is random, a pass is found by its number and that of its context, and only
# those that take part are told.


def _from_leader(me: int, sender: int, leader: int, message: Discover | Settled) -> bool:
    is_own = sender == leader != me
    if isinstance(message, Discover):
        return is_own and all(each >> WORKER_SHIFT == me for each in message.message_ids)
    return is_own


def _to_leader(me: int, sender: int, leader: int, message: Failed) -> bool:
    return me == leader and (message.worker == sender or message.operation == CONNECTION)


def _to_others(me: int, sender: int, leader: int, message: Abort) -> bool:
    return me != leader


def _between_partners(me: int, sender: int, leader: int, message: Report) -> bool:
    return True


PASS_RULES: dict[type, Callable[[int, int, int, Any], bool]] = {
    Discover: _from_leader,
    Settled: _from_leader,
    Failed: _to_leader,
    Report: _between_partners,
    Abort: _to_others,
}
"""By type of message, whether the receiver, the sender, the leader and the message fit together. A
part of a pass that this worker does not know has no effect, unless it is of the leader, or
gradients of a message that this worker sent."""


def check_pass_message(me: int, sender: int, pass_id: int, message: Message) -> None:
    """Checks that ``sender`` may say to ``me`` what a message of a backward pass says.

    Raises:
        ProtocolError: It may not.
    """
    leader = pass_id >> WORKER_SHIFT
    if not PASS_RULES[type(message)](me, sender, leader, message):
        raise ProtocolError(
            f"worker {sender} may not send {type(message).__name__} to worker {me} in pass "
            f"{pass_id}, which worker {leader} leads"
        )


def check_released(me: int, sender: int, message_ids: Iterable[int]) -> None:
    """Checks that messages that ``sender`` releases are of this worker.

    Raises:
        ProtocolError: They are not.
    """
    for message_id in message_ids:
        if message_id >> WORKER_SHIFT != me:
            raise ProtocolError(
                f"worker {sender} releases message {message_id}, which is not of worker {me}"
            )


def check_gradients(
    me: int, sender: int, message_id: int, recorded_id: int, to_worker: int | None
) -> None:
    """Checks that ``sender`` may send gradients of a message.

    Args:
        me: This worker, which must have sent the message.
        sender: The sender of the gradients.
        message_id: The message.
        recorded_id: The number under which the sender has recorded the gradients, or 0.
        to_worker: The receiver of the message; None if there is no record of it any more.

    Raises:
        ProtocolError: It may not.
    """
    is_own = message_id and message_id >> WORKER_SHIFT == me and to_worker in (None, sender)
    if not is_own or (recorded_id and recorded_id >> WORKER_SHIFT != sender):
        raise ProtocolError(
            f"worker {sender} sends gradients of message {message_id}, which worker {me} did not "
            "send to it"
        )
