"""The parts of one worker in backward passes: their messages, their threads, and their ends.

The thread that reads a message puts it into the inbox of the pass. One thread at a time empties
the inbox, runs the ready nodes and sends the resulting messages. For a pass that this worker
leads, that is the thread that called ``backward``; for any other pass, a task of the reactor.
"""

from __future__ import annotations

import math
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor

from torchweft import knobs
from torchweft.autograd.codec import CONTEXT_BYTES, Envelopes, PassMode, PassName, ids_in
from torchweft.autograd.component import OF_TORCH, PassEnded, operation_of
from torchweft.autograd.contexts import OF_ANOTHER_CONTEXT, RAN_INTO, Context, Contexts, first_of
from torchweft.autograd.data_parallel import AVERAGING
from torchweft.autograd.graph import Roots
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.autograd.outside import OutsideRecords
from torchweft.engine.protocol.backward import (
    Abort,
    Action,
    Apply,
    Close,
    Complete,
    Discover,
    Driver,
    Fail,
    Failed,
    Gradients,
    Message,
    Participant,
    Progress,
    Send,
    Settled,
    Tell,
    failure_error,
)
from torchweft.engine.protocol.numbers import Tombstones
from torchweft.engine.protocol.observing import GATHERING, PASS, Wait
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.interrupts import Flag, is_of_handler
from torchweft.engine.threads.reports import log_exception, names_of
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import MAX_SPAN_BYTES, Kind, pass_span
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import Spins, kinds_of
from torchweft.engine.worker.peers import Peer
from torchweft.errors import AutogradError, BackwardTimeout, NotInitialized, WorkerLost
from torchweft.ids import worker_of

LOST: Final = "lost"
"""Inbox item for a worker's loss. All others are frames, or this worker's own messages."""

_LOOK_S = 0.5
"""How often a thread that waits in a pass checks whether the worker has shut down."""

_REMEMBERED_PASSES = 4096
_PASS_KINDS = kinds_of(Kind.BACKWARD, Kind.GRADIENTS)


class Unreachable(NamedTuple):
    """Inbox item for messages outside of contexts that have become unreachable."""

    message_ids: Sequence[int]


Item = tuple[Peer, object]


class Passes:
    """The backward passes in which one worker takes part. Thread-safe.

    Args:
        agent: The worker's agent.
        contexts: Its contexts.
        outside: Its records outside of contexts.
        envelopes: Encodes and decodes the messages.
    """

    def __init__(
        self, agent: Agent, contexts: Contexts, outside: OutsideRecords, envelopes: Envelopes
    ) -> None:
        self.agent = agent
        self.me = agent.me.id
        self.contexts = contexts
        self.outside = outside
        self.envelopes = envelopes
        self.timeout_s = knobs.BACKWARD_TIMEOUT_S.get()
        self.watchers: Sequence[Any] = ()
        """The watchers of the worker; see ``rpc.watching.Watcher``."""
        self.lock = threading.RLock()
        self.parts: dict[tuple[int, int], PassPart] = {}
        """By the numbers of passes and of their contexts, those that this worker leads included."""
        self.led: dict[int, PassPart] = {}
        """Those that threads of this worker lead, by the number of the pass."""
        self._passes_of: dict[int, list[int]] = {}
        self._ended = Tombstones(_REMEMBERED_PASSES)
        self.numbers = first_of(self.me)
        """Makes the numbers of passes that this worker leads."""

    def all(self) -> list[PassPart]:
        """Returns all parts, also those that wait for the end of their context."""
        return list(self.parts.copy().values())

    def on_message(self, peer: Peer, frame: Frame) -> None:
        """Takes a message of a pass."""
        key = (frame.id, int.from_bytes(frame.control[:CONTEXT_BYTES], "little"))
        part = self.parts.get(key) or self._new_part(key, peer, frame)
        if part is None:
            self.envelopes.discard(peer, frame)
        elif part.put((peer, frame)):
            self.agent.reactor.tasks.append((part.work_off_all, None, None), peer.id)

    def _new_part(self, key: tuple[int, int], peer: Peer, frame: Frame) -> PassPart | None:
        """Creates this worker's part in a pass.

        Returns:
            The part; None if the pass is over or its leader is lost, or if this worker has no part
            in it for all that ``peer`` can say.
        """
        pass_id, context_id = key
        driver = worker_of(pass_id)
        if frame.kind == Kind.GRADIENTS:
            _, message_id, *_ = ids_in(frame.control)
            if self.outside.find(message_id, self.contexts.find(context_id)) is None:
                return None
        elif peer.id != driver:
            return None
        leader = self.agent.peers.get(driver)
        if leader is None or driver == self.me or self._is_over(key, leader):
            return None
        # Without the lock: the thread that has it may be in a signal handler, which waits for an
        # answer that only the thread here can read.
        machine = Participant(self.me, driver)
        part = self.parts.setdefault(key, PassPart(self, machine, pass_id, context_id))
        if self._is_over(key, leader):  # Race: another thread has just ended it.
            self.parts.pop(key, None)
            return None
        return part

    def _is_over(self, key: tuple[int, int], leader: Peer) -> bool:
        return key in self._ended or leader.lost is not None

    def begun(self, name: PassName) -> None:
        """Notes the name of a pass, and closes the parts in earlier ones, which it implies."""
        older: list[PassPart | None] = []
        with self.lock:
            passes = self._passes_of.setdefault(name.context_id, [])
            for pass_id in list(passes):
                if pass_id < name.oldest_id and worker_of(pass_id) == worker_of(name.pass_id):
                    passes.remove(pass_id)
                    self._ended.add((pass_id, name.context_id))
                    older.append(self.parts.pop((pass_id, name.context_id), None))
            passes.append(name.pass_id)
        if older:
            _close_all(older)

    def end(self, part: PassPart) -> None:
        """Releases a part, done or not; later messages of the pass are dropped."""
        with self.lock:
            self._ended.add(part.key)  # First: ``_new_part`` looks last.
            self.parts.pop(part.key, None)
            pass_id, context_id = part.key
            passes = self._passes_of.get(context_id, [])
            if pass_id in passes:
                passes.remove(pass_id)
            if not passes:
                self._passes_of.pop(context_id, None)
        part.close()

    def end_in(self, context_id: int) -> None:
        """Releases the parts in passes of a context that this worker has released."""
        with self.lock:
            keys = [(each, context_id) for each in self._passes_of.pop(context_id, ())]
            parts = [self.parts.pop(key, None) for key in keys]
        _close_all(parts)


def _close_all(parts: Iterable[PassPart | None]) -> None:
    for part in parts:
        if part is not None:
            part.close()


class PassPart:
    """A worker's part in a pass that another worker leads.

    Args:
        passes: The passes of this worker.
        machine: Decides what to send.
        pass_id: The pass.
        context_id: Its context.
    """

    name: PassName | None = None
    local: LocalPass | None = None
    driver: Driver | None = None
    """Leads the pass, if this worker does."""
    is_closed = False
    waits_since_s = math.inf
    """When this worker began to wait, by ``time.monotonic``; a leading one, for the first time."""
    _awaited: int | None = None
    """The worker whose gradients a gate waits for."""
    _is_led = False
    """Whether a thread of this worker leads the pass; it then empties the inbox at any time."""
    _signal: Flag | None = None
    _mark: Mark | None = None
    """The end of the GPU work of the thread that handled the items before."""

    def __init__(self, passes: Passes, machine: Participant, pass_id: int, context_id: int) -> None:
        self._passes = passes
        self._agent = passes.agent
        self.machine = machine
        self.pass_id = pass_id
        self.key = (pass_id, context_id)
        """Names the pass: a worker that takes no part in the context does not know it."""
        self.inbox: deque[Item] = deque()
        self._at_work = allocate_lock()
        """Held by the thread that handles items, or will soon."""
        if self._is_led:
            self._at_work.acquire(blocking=False)

    # The inbox

    def put(self, item: Item) -> bool:
        """Puts an item into the inbox; returns whether the caller must schedule its handling.

        Waits for no lock: a thread that reads a connection calls it.
        """
        self.inbox.append(item)
        if self._signal is not None:
            self._signal.set()
        return self._at_work.acquire(blocking=False)

    def take_all(self) -> list[Item]:
        """Empties the inbox. After an empty result the next ``put`` must schedule the handling."""
        inbox, items = self.inbox, []
        while True:
            while inbox:
                items.append(inbox.popleft())
            if device_streams.HAS_CUDA:
                # The next items may be another thread's, before this one's task has ended.
                if items:
                    device_streams.wait(self._mark)
                    self._mark = None
                else:
                    self._mark = device_streams.mark()
            if items or self._is_led:
                return items
            self._at_work.release()
            if not inbox or not self._at_work.acquire(blocking=False):
                return items  # Race: else, a ``put`` since the look has scheduled nothing.

    def wait(self, deadline_s: float) -> bool:
        """Blocks until an item is in the inbox or the part is closed.

        Args:
            deadline_s: The latest end of the wait, by ``time.monotonic``.

        Returns:
            Whether that is so; False if this worker shuts down.

        Raises:
            BackwardTimeout: Nothing came in time; names the workers.
        """
        reactor = self._agent.reactor
        with reactor.waiting(self.shown):
            while True:
                # Publish the signal before checking the inbox: a concurrent ``put`` then sets it.
                signal = self._signal = Flag()
                if self.inbox or self.is_closed:
                    return True
                left_s = deadline_s - time.monotonic()
                if signal.wait(min(left_s, _LOOK_S)):
                    return True
                if reactor.is_closing:
                    return False
                if left_s < 0:
                    raise self._timeout_error()

    # The state

    @property
    def is_under_way(self) -> bool:
        """Whether this worker works on the pass, or waits for more of its messages."""
        return self._at_work.locked() or (self.local is not None and self.local.is_waiting)

    def awaited(self) -> set[int]:
        """Returns the other workers for which this worker waits; a leader, for their progress."""
        if self.driver is not None:
            return self.driver.awaited_workers() - {self._passes.me}
        return set() if self._awaited is None else {self._awaited}

    def whom_it_awaits(self) -> str:
        """Describes the wait, in a report."""
        return f"in a backward pass for {names_of(self._names_awaited())}"

    def shown(self) -> list[Wait]:
        """Returns the wait for ``Reactor.waiting``; nothing if it is not for other workers."""
        names = self._names_awaited()
        age_s = max(time.monotonic() - self.waits_since_s, 0.0)
        return [Wait(PASS, str(self.pass_id), age_s, "a backward pass", names)] if names else []

    def _names_awaited(self) -> tuple[str, ...]:
        return tuple([self._agent.peers[each].name for each in sorted(self.awaited())])

    def _timeout_error(self) -> BackwardTimeout:
        missing = self._names_awaited()
        whom = "another thread of this worker"
        if missing:
            whom = f"{names_of(missing)}, or for workers that were called from there,"
        return BackwardTimeout(
            f"a backward pass has waited {self._passes.timeout_s:g} s (WEFT_BACKWARD_TIMEOUT_S) "
            f"for {whom} and has ended; raise the variable if a pass may take longer",
            worker=missing[0] if missing else "",
            operation="waiting for the pass",
            missing=missing,
        )

    def close(self) -> None:
        """Ends this part, done or not; a thread that waits in a gate of it goes on."""
        self.is_closed = True
        if self._signal is not None:
            self._signal.set()
        if self.local is not None:
            if not self.machine.is_over:
                try:
                    self.local.finish_hooks()
                except Exception:
                    log_exception("a hook of several tensors raised after the pass")
            self.local.close()

    # Work

    def work_off_all(self, _: object = None, __: object = None) -> None:
        """Handles the items of the inbox until there are none; a task of the reactor."""
        while items := self.take_all():
            self.send_all(self._work_off(items))
            if self.local is not None and self.local.is_averaging_due:
                self.send_all(self._average(self.local))

    def _work_off(self, items: Iterable[Item]) -> list[Action]:
        """Handles received items, runs ready nodes, and returns the resulting actions."""
        actions: list[Action] = []
        try:
            for peer, item in items:
                actions += self._receive(peer, item)
            local = self.local
            if local is not None and not self.machine.is_over:
                work = local.work
                key = local.pass_id, local.context_id
                for each in self._passes.watchers:
                    work = partial(each.part_runs, key, local.operations_due, work)
                actions += self.machine.worked(*work())
        except PassEnded as ended:
            if ended.error is not None:
                raise ended.error from ended.error.__cause__
        except BaseException as error:  # Hooks and functions of the program can raise any error.
            if self._is_of_caller(error):
                raise
            operation = operation_of(error)
            if operation == OF_TORCH and RAN_INTO in str(error):
                error = AutogradError(OF_ANOTHER_CONTEXT)
            actions += self.machine.failed(operation, error)
        return actions

    def _is_of_caller(self, error: BaseException) -> bool:
        """Whether an error is of the thread that leads the pass, as a signal, not of the pass."""
        return self._is_led and (not isinstance(error, Exception) or is_of_handler(error))

    def _average(self, local: LocalPass) -> list[Action]:
        """Has DDP average gradients; may block until its other ranks do the same."""
        began_s = time.monotonic()

        def shown() -> list[Wait]:
            key, age_s = f"average {self.pass_id}", time.monotonic() - began_s
            return [Wait(GATHERING, key, age_s, AVERAGING, ())]

        with self._agent.reactor.waiting(shown):
            try:
                return self.machine.worked((), local.average())
            except BaseException as error:
                if self._is_of_caller(error):
                    raise
                return self.machine.failed(AVERAGING, error)

    def _receive(self, peer: Peer, item: object) -> list[Action]:
        message: Any = item
        if type(item) is Frame:
            name, message = self._passes.envelopes.open(peer, item)
            if self.name is None:
                self.name = name
        elif item is LOST:
            ended = [] if self.driver is None else self.driver.worker_lost(peer.id, peer.lost)
            return ended or self.machine.worker_lost(peer.id, peer.lost)
        elif type(item) is Unreachable:
            if self.local is not None:
                self.local.forget(item.message_ids)
            return []
        if type(message) is Failed:  # Only the leader has to know.
            return [] if self.driver is None else self.driver.failed(message)
        if self.local is None and type(message) is not Abort:
            self._begin()
        actions = self.machine.receive(peer.id, message)
        if actions and type(actions[0]) is Apply:  # It comes alone.
            self.apply(actions[0].message)
            return []
        return actions

    def apply(self, message: Gradients | Discover | Settled) -> None:
        """Delivers a message to the pass on this worker."""
        local = self.local
        assert local is not None
        if isinstance(message, Gradients):
            local.arrive(message.message_id, message.gradients)
        elif isinstance(message, Discover):
            local.announce(message.message_ids, message.parts)
        else:
            local.settle()

    def _begin(self) -> None:
        """Prepares for the first message of a pass that another worker leads."""
        name, passes = self.name, self._passes
        assert name is not None
        context = passes.contexts.get_or_create(name.context_id, worker_of(name.pass_id))
        self.local = LocalPass(context, name.mode, outside=passes.outside)
        self.local.pass_id = name.pass_id
        self.local.exchange = self._exchange
        passes.begun(name)
        # Raises if the context was released in between: nothing would close this part then.
        passes.contexts.get(name.context_id)

    # Within a run of torch's engine

    def _exchange(self, message_id: int, outgoing: list[Outgoing], progress: Progress) -> None:
        """Exchanges messages with other workers; see ``LocalPass.exchange``."""
        self.send_all(self.machine.worked(outgoing, progress))
        if not (self.inbox or self.machine.is_over or self.is_closed):
            self._wait_in_gate(message_id)
        if self.inbox:  # Else, the next message would schedule another task.
            self.send_all(self._receive_all())
        if self.machine.is_over or self.is_closed:
            raise PassEnded

    def _receive_all(self) -> list[Action]:
        actions: list[Action] = []
        for peer, item in self.take_all():
            actions += self._receive(peer, item)
        return actions

    def _wait_in_gate(self, message_id: int) -> None:
        """Waits until another thread has filled the inbox, or the pass has ended."""
        passes = self._passes
        send = passes.outside.find(message_id, passes.contexts.get(self.key[1]))
        self._awaited = None if send is None else send.to_worker
        self.waits_since_s = time.monotonic()
        try:
            if not self.wait(self.waits_since_s + passes.timeout_s):
                raise PassEnded
        finally:
            self._awaited = None

    # Sending

    def send_all(self, actions: Iterable[Action]) -> None:
        """Sends messages, in one write for each worker: every write wakes a thread there."""
        by_worker: dict[int, list[Message]] = {}
        for action in actions:
            if type(action) is Send:
                by_worker.setdefault(action.to_worker, []).append(action.message)
            elif type(action) is Close:
                self._passes.end(self)
        for worker, messages in by_worker.items():
            try:
                self._send(self._agent.peers[worker], messages)
            except Exception as error:
                if is_of_handler(error):
                    raise
                failed = self.machine.failed(operation_of(error), error)
                self.send_all(self._follow_up(failed))

    def _follow_up(self, actions: list[Action]) -> list[Action]:
        """Carries out actions for a driver on this worker; returns the others."""
        return actions

    def _send(self, peer: Peer, messages: Sequence[Message]) -> None:
        assert self.name is not None
        buffers = self._passes.envelopes.encode(peer, self.name, messages)
        for each in self._passes.watchers:
            span = each.span_before(peer.id, (self.name.pass_id, self.name.context_id))
            if 0 < len(span) <= MAX_SPAN_BYTES:
                name = self.name
                buffers = [*pass_span(name.pass_id, name.context_id, span), *buffers]
        if type(messages[0]) in (Failed, Abort):
            self._agent.sender.post(peer, buffers)  # A lost worker need not receive it.
        else:
            # The leading thread holds the connections for reading. If it blocked on a full socket
            # while the peer did the same, neither side would read.
            self._agent.sender.send(peer, buffers, may_block=not self._is_led)


class LedPass(PassPart):
    """A pass that a thread of this worker leads.

    Args:
        passes: The passes of this worker.
        context: This worker's records.
        mode: How it is run on other workers.
        local: This worker's graphs, with the roots.
    """

    name: PassName
    local: LocalPass
    driver: Driver
    _is_led = True
    outcome: Complete | Fail | None = None
    _deadline_s = math.inf
    _has_ended = False

    def __init__(self, passes: Passes, context: Context, mode: PassMode, local: LocalPass) -> None:
        me = passes.me
        super().__init__(passes, Participant(me, me), 0, context.id)
        self.local = local
        self.driver = Driver(me)
        self._mode = mode
        self._context = context
        self._others: list[Peer] = []
        local.exchange = self._exchange

    # The state

    def shown(self) -> list[Wait]:
        """Returns the wait for ``Reactor.waiting``; nothing once the pass is over."""
        return [] if self._has_ended or self.outcome is not None else super().shown()

    # Leading

    def run(self, roots: Roots | Sequence[Tensor]) -> None:
        """Blocks until the pass is over everywhere.

        Args:
            roots: Where it starts.

        Raises:
            AutogradError: It failed.
        """
        try:
            try:
                self.local.start(roots)  # Its walk may reach messages of further workers.
                self._others = [*map(self._agent.peers.__getitem__, self._context.known_workers)]
                self._register()
                self._run()
            finally:
                self._end()
        finally:
            if not self._has_ended:  # A signal handler has raised an error within ``_end``.
                self._end()

    def _register(self) -> None:
        """Gives the pass its number; from then on it gets messages."""
        passes, context_id = self._passes, self.key[1]
        with passes.lock:
            number = self.pass_id = self.local.pass_id = next(passes.numbers)
            oldest = number
            for other in passes.led.values():
                if other.key[1] == context_id:
                    oldest = min(oldest, other.pass_id)
            self.key = (number, context_id)
            self.name = PassName(context_id, number, oldest, self._mode)
            passes.led[number] = passes.parts[self.key] = self

    def _end(self) -> None:
        with self._passes.lock:
            self._passes.led.pop(self.pass_id, None)
            self._passes.parts.pop(self.key, None)
        self.local.close()
        self._has_ended = True

    def _run(self) -> None:
        try:
            self._lead()
            self.local.finish_hooks()
        except BaseException as error:
            self.send_all(self._follow_up(self.driver.cancel(error)))
            raise

    def _lead(self) -> None:
        sends = self._follow_up(self._work_off(()))
        while self.outcome is None:
            if self.inbox or self.local.is_averaging_due:
                self.send_all(sends)
                if self.outcome is None and self.local.is_averaging_due:
                    self.send_all(self._follow_up(self._average(self.local)))
            else:
                self._send_and_wait(sends)
            sends = self._follow_up(self._work_off(self.take_all()))
        if sends:
            self.send_all(sends)
        if isinstance(self.outcome, Fail):
            raise self._failure(self.outcome)

    def _send_and_wait(self, sends: Sequence[Action]) -> None:
        agent = self._agent
        if self._deadline_s == math.inf:  # The first wait starts the timeout.
            self.waits_since_s = time.monotonic()
            self._deadline_s = self.waits_since_s + self._passes.timeout_s
        lease = agent.waiter.lease(self._others)
        taken: list[Frame] = []
        try:
            self.send_all(sends)
            if lease is not None and self.outcome is None:
                wanted = (_PASS_KINDS, self.pass_id, taken, None)
                agent.waiter.read(
                    lease, wanted, Spins.PASSES, self._deadline_s, self._is_woken, self.shown
                )
        finally:
            if lease is not None:
                lease.release()
        for frame in taken:
            agent.receiver.take(self._others[0], frame)
        if not self.inbox and self.outcome is None:  # A failed send sets the outcome.
            self._wait_for_others()

    def _is_woken(self) -> bool:
        """Whether a wait has ended without a message that this thread has read."""
        for peer in self._others:
            if peer.lost is not None:
                return True
        return bool(self.inbox)

    def _wait_for_others(self) -> None:
        """Waits for other threads to fill the inbox."""
        if not self.wait(self._deadline_s):
            raise NotInitialized("this worker shut down before a backward pass had ended")

    def _exchange(self, message_id: int, outgoing: list[Outgoing], progress: Progress) -> None:
        """Takes a turn of ``_lead`` within a run of torch's engine; see ``LocalPass.exchange``."""
        sends = self._follow_up(self.machine.worked(outgoing, progress))
        try:
            if self.inbox or self.outcome is not None:
                self.send_all(sends)
            else:
                self._send_and_wait(sends)
        except BaseException as error:  # Not an error of the graph that is running.
            raise PassEnded(error) from None
        if self.outcome is None:
            self.send_all(self._follow_up(self._receive_all()))
        if self.outcome is not None:
            raise PassEnded

    def _follow_up(self, actions: list[Action]) -> list[Action]:
        """Carries out actions for this worker; returns the messages for other workers."""
        sends: list[Action] = []
        for action in actions:  # The body appends to it.
            if type(action) is Send:
                if action.to_worker == self._passes.me:
                    actions += self._to_itself(action.message)
                else:
                    sends.append(action)
            elif type(action) is Tell:
                actions += self.driver.progressed(action.progress)
            elif type(action) is Complete or type(action) is Fail:
                self.outcome = action
        return sends

    def _to_itself(self, message: Any) -> list[Action]:
        """Takes a message from this worker to itself; returns the actions that follow at once."""
        if isinstance(message, Failed):
            return self.driver.failed(message)
        if isinstance(message, Abort):  # The inbox is not read any more.
            return self.machine.receive(self._passes.me, message)
        self.put((self._agent.me, message))
        return []

    def _failure(self, fail: Fail) -> AutogradError:
        if isinstance(fail.error, bytes):
            fail = fail._replace(error=self._passes.envelopes.error_of(fail.error))
        name = self._agent.peers[fail.worker].name
        if isinstance(fail.error, WorkerLost):
            name = fail.error.worker or name  # Another worker may have noticed first.
        return failure_error(fail, name)
