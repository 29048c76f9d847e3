"""The parts of one worker in backward passes: their messages, their threads, and their ends.

The thread that reads a message puts it into the inbox of the pass. One thread at a time empties
the inbox, runs the ready nodes and sends the resulting messages. For a pass that this worker
leads, that is the thread that called ``backward`` (see ``led_pass``); for any other pass, a task of
the reactor.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from torchweft import knobs
from torchweft.autograd.codec import CONTEXT_AT, Envelopes, PassName, numbers_of_gradients
from torchweft.autograd.component import PassEnded
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.data_parallel import AVERAGING
from torchweft.autograd.local_engine import OF_TORCH, operation_of
from torchweft.autograd.local_pass import LocalPass, Outgoing
from torchweft.autograd.outside import OutsideRecords
from torchweft.autograd.records import OF_ANOTHER_CONTEXT, RAN_INTO
from torchweft.errors import AutogradError, BackwardTimeout
from torchweft.free_threading import shared_count
from torchweft.ids import scoped_id, worker_of
from torchweft.protocol.backward import (
    Abort,
    Action,
    Apply,
    Close,
    Discover,
    Failed,
    Gradients,
    Message,
    Participant,
    Progress,
    Send,
    Settled,
)
from torchweft.protocol.numbers import Tombstones
from torchweft.protocol.observing.keys import PASS, Wait
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.threads.interrupts import Flag, is_of_handler
from torchweft.threads.reports import log_exception, names_of
from torchweft.wire.frames import Buffer, Frame
from torchweft.wire.messages import Kind
from torchweft.worker.agent import Agent
from torchweft.worker.peers import Peer

LOST: Final = "lost"
"""Inbox item for a worker's loss. All others are frames, or this worker's own messages."""

LOOK_S = 0.5
"""How often a thread that waits in a pass checks whether the worker has shut down."""

_REMEMBERED_PASSES = 4096


class Unreachable(NamedTuple):
    """Inbox item for messages outside of contexts that have become unreachable."""

    message_ids: Sequence[int]


Item = tuple[Peer, object]


class PassWatcher:
    """Is told of the backward passes of one worker; does nothing unless a method is overridden."""

    def pass_runs(self, context_id: int) -> contextlib.AbstractContextManager[object]:
        """Returns a block around a pass that this worker leads."""
        return contextlib.nullcontext()

    def part_runs(
        self, local: LocalPass, work: Callable[[], tuple[list[Outgoing], Progress]]
    ) -> tuple[list[Outgoing], Progress]:
        """Runs ``work``, a step of this worker's part of a pass, and returns its result."""
        return work()

    def messages_before(self, peer: Peer, name: PassName) -> list[Buffer]:
        """Returns the bytes of messages that stand before the next one of a pass to a worker."""
        return []

    def take_span(self, key: tuple[int, int], context: bytes) -> None:
        """Takes the numbers of a pass and its context, and its span, from another worker."""


class Passes:
    """The backward passes in which one worker takes part. Thread-safe.

    Args:
        agent: The worker's agent.
        contexts: Its contexts.
        outside: Its records outside of contexts.
        envelopes: Encodes and decodes the messages.
    """

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        outside: OutsideRecords,
        envelopes: Envelopes,
    ) -> None:
        self.agent = agent
        self.me = agent.me.id
        self.contexts = contexts
        self.outside = outside
        self.envelopes = envelopes
        self.timeout_s = knobs.BACKWARD_TIMEOUT_S.get()
        self.watchers: Sequence[PassWatcher] = ()
        self.lock = threading.RLock()
        self.parts: dict[tuple[int, int], PassPart] = {}
        """By the numbers of passes and of their contexts, those that this worker leads included."""
        self.led: dict[int, PassPart] = {}
        """Those that threads of this worker lead, by the number of the pass."""
        self._passes_of: dict[int, list[int]] = {}
        self._ended = Tombstones(_REMEMBERED_PASSES)
        self._numbers = shared_count(1)

    def new_id(self) -> int:
        """Returns the number of a pass that this worker leads; it is new in the group."""
        return scoped_id(self.me, next(self._numbers))

    def all(self) -> list[PassPart]:
        """Returns all parts, also those that wait for the end of their context."""
        with self.lock:
            return list(self.parts.values())

    def on_message(self, peer: Peer, frame: Frame) -> None:
        """Takes a message of a pass."""
        at = CONTEXT_AT[frame.kind]
        key = (frame.id, int.from_bytes(frame.control[at : at + 8], "little"))
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
            _, message_id, _ = numbers_of_gradients(frame.control)
            context = self.contexts.find(context_id)
            is_inside = context is not None and context.send(message_id) is not None
            if not is_inside and self.outside.send(message_id) is None:
                return None
        elif peer.id != driver:
            return None
        with self.lock:
            is_over = key in self._ended or driver == self.me
            leader = self.agent.peers.get(driver)
            if is_over or leader is None or leader.lost is not None:
                return None
            machine = Participant(self.me, driver)
            return self.parts.setdefault(key, PassPart(self, machine, pass_id, context_id))

    def begun(self, name: PassName) -> None:
        """Notes the name of a pass, and closes the parts in earlier ones, which it implies."""
        with self.lock:
            passes = self._passes_of.setdefault(name.context_id, [])
            older = self._take_older(name, passes) if passes else ()
            passes.append(name.pass_id)
        for each in older:
            each.close()

    def _take_older(self, name: PassName, passes: list[int]) -> list[PassPart]:
        older: list[PassPart] = []
        for pass_id in list(passes):
            if pass_id < name.oldest_id and worker_of(pass_id) == worker_of(name.pass_id):
                passes.remove(pass_id)
                key = (pass_id, name.context_id)
                self._ended.add(key)
                part = self.parts.pop(key, None)
                if part is not None:
                    older.append(part)
        return older

    def end(self, part: PassPart) -> None:
        """Releases a part, done or not; later messages of the pass are dropped."""
        with self.lock:
            self.parts.pop(part.key, None)
            self._ended.add(part.key)
            if part.name is not None:
                passes = self._passes_of.get(part.name.context_id, [])
                if part.pass_id in passes:
                    passes.remove(part.pass_id)
                if not passes:
                    self._passes_of.pop(part.name.context_id, None)
        part.close()

    def end_in(self, context_id: int) -> None:
        """Releases the parts in passes of a context that this worker has released."""
        with self.lock:
            keys = [(each, context_id) for each in self._passes_of.pop(context_id, ())]
            parts = [self.parts.pop(key, None) for key in keys]
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
    is_closed = False
    waits_since_s = math.inf
    """When this worker began to wait, by ``time.monotonic``; a leading one, for the first time."""
    _awaited: int | None = None
    """The worker whose gradients a gate waits for."""
    _may_block = True
    """Whether this thread may block on a full socket."""
    _is_at_work = False
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
        self.inbox: Any = []
        self._lock = passes.lock

    # The inbox

    def put(self, item: Item) -> bool:
        """Puts an item into the inbox; returns whether the caller must schedule its handling."""
        with self._lock:
            self.inbox.append(item)
            was_at_work, self._is_at_work = self._is_at_work, True
        if self._signal is not None:
            self._signal.set()
        return not was_at_work

    def take_all(self) -> list[Item]:
        """Empties the inbox. After an empty result the next ``put`` must schedule the handling."""
        with self._lock:
            items: list[Item]
            items, self.inbox = self.inbox, []
            self._is_at_work = bool(items)
            if device_streams.HAS_CUDA:
                # The next items may be another thread's, before this one's task has ended.
                if items:
                    device_streams.wait(self._mark)
                    self._mark = None
                else:
                    self._mark = device_streams.mark()
        return items

    def wait(self, limit_s: float) -> bool:
        """Blocks until an item is in the inbox or the pass is over; returns False if none is.

        Args:
            limit_s: The longest time.
        """
        # Publish the signal before checking the inbox: a concurrent ``put`` then sets it.
        signal = self._signal = Flag()
        if not (self.inbox or self.is_closed):
            signal.wait(limit_s)
        return bool(self.inbox)

    # The state

    @property
    def is_under_way(self) -> bool:
        """Whether this worker works on the pass, or waits for more of its messages."""
        return self._is_at_work or (self.local is not None and self.local.is_waiting)

    def awaited(self) -> set[int]:
        """Returns the other workers for which this worker waits in the pass."""
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
                self._finish_hooks(self.local)
            self.local.close()

    def _finish_hooks(self, local: LocalPass) -> None:
        try:
            local.finish_hooks()
        except Exception:
            log_exception("a hook of several tensors raised after the pass")

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
                for each in self._passes.watchers:
                    work = partial(each.part_runs, local, work)
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
        return False

    def _average(self, local: LocalPass) -> list[Action]:
        """Has DDP average gradients; may block until its other ranks do the same."""
        is_counted = self._agent.reactor.begin_wait()
        try:
            return self.machine.worked((), local.average())
        except BaseException as error:
            if self._is_of_caller(error):
                raise
            return self.machine.failed(AVERAGING, error)
        finally:
            if is_counted:
                self._agent.reactor.end_wait()

    def _receive(self, peer: Peer, item: object) -> list[Action]:
        if item is LOST:
            return self._worker_lost(peer)
        message: Any = item
        if type(item) is Unreachable:
            if self.local is not None:
                self.local.forget(item.message_ids)
            return []
        if type(item) is Frame:
            name, message = self._passes.envelopes.open(peer, item)
            if self.name is None:
                self.name = name
        if type(message) is Failed:
            return self._take_failure(message)
        if self.local is None and type(message) is not Abort:
            self._begin()
        actions = self.machine.receive(peer.id, message)
        if actions and type(actions[0]) is Apply:  # It comes alone.
            self.apply(actions[0].message)
            return []
        return actions

    def _take_failure(self, failed: Failed) -> list[Action]:
        return []  # Only the leader has to know.

    def _worker_lost(self, peer: Peer) -> list[Action]:
        return self.machine.worker_lost(peer.id, peer.lost)

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
        """Waits for an item in the inbox, which other threads fill, or for the end of the pass.

        Raises:
            BackwardTimeout: Nothing came in time; names the worker.
        """
        passes, reactor = self._passes, self._agent.reactor
        context = passes.contexts.get(self.key[1])
        send = context.send(message_id) or passes.outside.send(message_id)
        self._awaited = None if send is None else send.to_worker
        self.waits_since_s = time.monotonic()
        try:
            with reactor.waiting(self.shown):
                while not (self.wait(LOOK_S) or self.is_closed):
                    if reactor.is_closing:
                        raise PassEnded
                    if time.monotonic() > self.waits_since_s + passes.timeout_s:
                        raise self._timeout_error()
        finally:
            self._awaited = None

    # Sending

    def send_all(self, actions: Iterable[Action]) -> None:
        """Sends messages, in one write for each worker: every write wakes a thread there."""
        by_worker: dict[int, list[Message]] = {}
        for action in actions:
            if isinstance(action, Send):
                by_worker.setdefault(action.to_worker, []).append(action.message)
            elif isinstance(action, Close):
                self._passes.end(self)
        for worker, messages in by_worker.items():
            try:
                self._send(self._agent.peers[worker], messages)
            except Exception as error:
                if is_of_handler(error):
                    raise
                self._failed(self.machine.failed(operation_of(error), error))

    def _failed(self, actions: list[Action]) -> None:
        self.send_all(actions)

    def _send(self, peer: Peer, messages: Sequence[Message]) -> None:
        assert self.name is not None
        buffers = self._passes.envelopes.encode(peer, self.name, messages)
        for each in self._passes.watchers:
            buffers = [*each.messages_before(peer, self.name), *buffers]
        if type(messages[0]) in (Failed, Abort):
            self._agent.sender.post(peer, buffers)  # A lost worker need not receive it.
        else:
            self._agent.sender.send(peer, buffers, may_block=self._may_block)
