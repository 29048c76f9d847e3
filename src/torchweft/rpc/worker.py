"""One worker's calls, references, tensors and graphs, and who watches its calls.

A worker has a tuple of watchers (counters, traces, spans), which is usually empty. Each step of a
call looks whether there are any, and tells them. A call that has begun before somebody watches has
no notes, and is told of without them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from asyncio import CancelledError
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweft import knobs
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.engine import Engine
from torchweft.autograd.outside import Arrivals
from torchweft.engine.codec.exceptions import pack_error, shown
from torchweft.engine.codec.objects import Packed
from torchweft.engine.codec.reading import TRUSTING, Reader
from torchweft.engine.codec.tensors import shared_ranges
from torchweft.engine.codec.values import no_home
from torchweft.engine.protocol.calls import AnsweredCall, ServedCall, SlowFunctions, function_name
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    MAX_SPAN_BYTES,
    NO_CONTEXTS,
    HandedReference,
    Kind,
    encode_reply,
)
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle, ReferenceKeeper
from torchweft.engine.worker.tensor_messages import (
    LocalMessage,
    TensorMessages,
    local_frame,
    reply_by_tables,
)
from torchweft.errors import CallCancelled, NotInitialized, SerializationError
from torchweft.native import native
from torchweft.rpc.codec import Decoder, Encoder
from torchweft.rpc.coroutines import CoroutineRunner, LoopWatch
from torchweft.rpc.watching import Watcher, tell_messages

_log = logging.getLogger("torchweft")


class Worker:
    """Makes and serves the calls of one worker.

    Args:
        agent: The worker's agent.
        reference_type: Class of the references that the worker makes and receives.
        reader: Decodes messages of other workers; messages to itself are trusted.
        copies_own: Whether tensors in calls to itself are copied.
        warns_of_lost_gradients: Whether a backward pass that ends in a tensor of another worker
            warns instead of raising.
    """

    def __init__(
        self,
        agent: Agent,
        reference_type: type[Handle],
        reader: Reader = TRUSTING,
        *,
        copies_own: bool = False,
        warns_of_lost_gradients: bool = False,
    ) -> None:
        self.agent = agent
        self.reference_type = reference_type
        self.copies_own = copies_own
        self.reader = reader
        self.tensor_messages = TensorMessages(agent)
        self.references = ReferenceKeeper(agent)
        self.engine = Engine(agent, self.tensor_messages, reader)
        self.contexts: Contexts = self.engine.contexts
        self.arrivals = Arrivals(self.engine.outside, warns_of_lost_gradients)
        self.coroutines = CoroutineRunner(f"weft-{agent.info.name}-asyncio", agent.served_streams)
        LoopWatch(self.coroutines, agent)
        self.serving: dict[int, ServedCall | None] = {}
        """The call whose function each thread runs, by thread; for reports."""
        self.unfinished: set[AnsweredCall] = set()
        """Served calls that make values; a coroutine's call holds no thread while it runs."""
        tensors, references = self.tensor_messages, self.references
        graphs = (self.engine, self.arrivals)
        self.encoder = Encoder(agent, tensors, references, *graphs)
        self.decoder = Decoder(
            agent, reader, tensors, references, reference_type, *graphs, copies_own
        )
        self.result_of, self.discard_reply = self.decoder.result_of, self.decoder.discard
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self.has_left = False
        """Whether this process has left its group, though it may still serve for a moment."""
        self.on_failure: Callable[[Peer, BaseException], None] | None = None
        """Called with the caller and the error of every call that failed here."""
        self.slow = SlowFunctions()
        self.usual: dict[bytes, tuple[object, str, object]] = {}
        """The functions whose usual calls the native twin serves, by name: the object that has it,
        the attribute, and the function. Empty while anybody watches calls."""
        self.unseen = UnseenErrors(agent, references, reader.unpack_error, self.pack_error)
        self.watchers: tuple[Watcher, ...] = ()
        """Hear of all calls and backward passes from when they were added."""
        self.carrier: Watcher | None = None
        """The watcher by whom calls carry contexts, if any."""
        self._watchers_lock = threading.Lock()
        agent.receiver.discard = self.discard_reply

    def close(self, limit_s: float) -> None:
        """Ends the threads of the parts; the agent is closed separately.

        Args:
            limit_s: Seconds to wait for coroutines, and for tensors in transit.
        """
        end_s = time.monotonic() + limit_s
        self.coroutines.close(limit_s)
        self.tensor_messages.close(end_s - time.monotonic())

    # Answers

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        """Sends the result of a call, or an error if the result cannot be serialized."""
        handed: Sequence[HandedReference] = ()
        message_id = 0
        answer: Any = None
        message: bytes | Outgoing = b""
        try:
            if (
                native is not None
                and not (type(result) is torch.Tensor and result.requires_grad)
                and context_id in NO_CONTEXTS
                and not (peer.is_self or peer.device_maps.moves_host_of_answers or shared_ranges)
            ):
                receiver, most = peer.receiver, self._tensor_limit
                answer = native.encode_result(number, context_id, result, receiver, most, no_home)
            if not answer:
                payload, tensors, externals, inlined = self.encoder.packed_result(
                    peer, result, answer is False
                )
                if context_id or inlined is None or inlined[1]:
                    context_id, message_id = self.encoder.record_send(
                        context_id, tensors, peer, True
                    )
                if externals:
                    handed = self.encoder.hand_on(externals, peer)
                if inlined is not None:
                    control = encode_reply(context_id, message_id, handed, payload, inlined[0])
                    (answer,) = encode_frame(Kind.REPLY, 0, number, control)
                else:
                    packed = Packed(payload, tensors, list(externals))
                    message = reply_by_tables(
                        self.tensor_messages, peer, number, context_id, message_id, packed, handed
                    )
        except BaseException as error:  # The result's own code may even exit.
            self.encoder.take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)
            return
        self.send_reply(peer, number, answer or message, handed, message_id)

    def send_reply(
        self,
        peer: Peer,
        number: int,
        message: bytes | bytearray | Outgoing,
        handed: Sequence[HandedReference] = (),
        message_id: int = 0,
    ) -> None:
        """Sends the result of a call: one whole frame, or a message.

        Args:
            peer: The caller.
            number: The number of the call.
            message: The frame, or the message.
            handed: The references that it hands on.
            message_id: The number of its tensors in their graph, or 0.
        """
        try:
            if isinstance(message, (bytes, bytearray)):
                self.agent.sender.answer(peer, message)
            else:
                self.agent.sender.send(peer, message)
        except (ConnectionError, NotInitialized):
            self.encoder.take_back(peer, handed, message_id)
            _log.debug("the result of call %d goes nowhere: one of the two has left", number)
        except BaseException as error:
            self.encoder.take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        """Sends the error of a call."""
        if self.has_left and isinstance(error, (NotInitialized, CancelledError)):
            return  # The caller is told soon that this worker is lost.
        self.note_failure(peer, error)
        payload = self.pack_error(peer, error)
        message: Outgoing
        if peer.is_self:
            local = LocalMessage((0, 0, (), 0, 0), payload, (), ())
            message = local_frame(Kind.REPLY, ERROR_REPLY, number, local)
        else:
            try:
                control = encode_reply(0, 0, (), payload)
            except SerializationError as too_large:
                too_large.__context__ = None  # The error that is too large.
                control = encode_reply(0, 0, (), self.pack_error(peer, too_large))
            message = encode_frame(Kind.REPLY, ERROR_REPLY, number, control)
        try:
            self.agent.sender.send(peer, message)
        except (ConnectionError, NotInitialized):
            _log.debug("the error of call %d goes nowhere: caller or this worker has left", number)

    def pack_error(self, peer: Peer, error: BaseException) -> bytes:
        """Packs an error in a form that ``peer`` can read."""
        return pack_error(
            error,
            self.agent.info.name,
            main_by_name=peer.main_by_name,
            is_plain=peer.registration.is_strict and not peer.is_self,
        )

    def note_failure(self, peer: Peer, error: BaseException) -> None:
        """Passes the error of a call to ``on_failure``; never raises."""
        if self.on_failure is not None:
            try:
                self.on_failure(peer, error)
            except BaseException:  # Showing the error runs its own code.
                log_exception("the error of a call of worker %r could not be shown", peer.name)

    # Watchers

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Has a watcher hear of what this worker does from now on. Thread-safe.

        Returns:
            A function that ends it; it may be called several times.
        """
        with self._watchers_lock:
            self._watch((*self.watchers, watcher))
        if not watcher.hears_messages:
            return partial(self.unwatch, watcher)
        end_messages = tell_messages(self.agent, self.tensor_messages, watcher)

        def end() -> None:
            end_messages()
            self.unwatch(watcher)

        return end

    def unwatch(self, watcher: Watcher) -> None:
        """Has a watcher hear of no further calls; nothing if it does not watch. Thread-safe."""
        with self._watchers_lock:
            self._watch(tuple(each for each in self.watchers if each is not watcher))

    def _watch(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = self.engine.passes.watchers = watchers
        self.carrier = next((each for each in watchers if each.carries_contexts), None)
        self.usual.clear()

    def note_call(self, call: PendingCall) -> bytes:
        """Tells the watchers of a call that begins; returns the span context that it carries."""
        call.watchers = watchers = self.watchers
        call.notes = {}
        context = b"".join([each.call_begins(call) for each in watchers])
        return context if len(context) <= MAX_SPAN_BYTES else b""

    def note_serving(self, call: AnsweredCall) -> None:
        """Tells the watchers of a served call whose turn has come."""
        call.notes = {}
        for each in self.watchers:
            each.serving_begins(call)


WORKER: Slot[Worker] = Slot()


def current_worker() -> Worker:
    """Returns the worker of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current().slots[WORKER]


# Reports errors that the program never looked at: logged once, at the caller.
#
# A failed call has a *guard*, held by the call's future or by the value that could not be made.
# Looking at the error disarms the guard. A guard that is finalized while armed queues its report,
# and a task writes the log. Guards still armed at shutdown report then. Calls that succeed have no
# guard, so they pay nothing.
#
# Only the owner of a value knows whether a worker asked for it; the creator does not. So the owner
# has the guard, and sends the report to the creator in a ``FAILED`` message.

_QUEUE_LIMIT = 1000
_SHOWN_LIMIT = 20
_CALL = "the call of {} on worker {!r} failed, and its result was never looked at"
_VALUE = "a remote() call on worker {!r} failed, and its reference was never used"
_UNTOLD = (CallCancelled, NotInitialized)
"""Not reported: the program itself cancelled the call, or shut its worker down."""


class Report(NamedTuple):
    """An error that the program has not looked at.

    Attributes:
        text: Names the failed call.
        error: The error; bytes if another worker sent it or is to get it.
        creator: The worker that is to be told; None for this worker.
    """

    text: str
    error: BaseException | bytes
    creator: Peer | None = None


class Guard:
    """Reports an error when finalized, unless the error was looked at.

    Args:
        report: What to report.
        enqueue: Takes the report; called by the finalizer.
    """

    __slots__ = ("__weakref__", "_enqueue", "_report", "was_seen")

    def __init__(self, report: Report, enqueue: Callable[[Report], None]) -> None:
        self.was_seen = False
        self._report = report
        self._enqueue = enqueue

    def trip(self) -> None:
        """Reports the error at most once, unless it was looked at."""
        if not self.was_seen:
            self.was_seen = True
            self._enqueue(self._report)

    __del__ = trip


class UnseenErrors:
    """The guards of one worker, and the queue of their reports. Thread-safe.

    Args:
        agent: Its agent.
        references: Calls ``before_flush``, which sends the reports for creators first.
        unpack_error: Decodes the error of another worker.
        pack_error: Packs an error in a form that a worker can read.
    """

    def __init__(
        self,
        agent: Agent,
        references: ReferenceKeeper,
        unpack_error: Callable[[bytes], BaseException],
        pack_error: Callable[[Peer, BaseException], bytes],
    ) -> None:
        self._agent = agent
        self._unpack_error = unpack_error
        self._pack_error = pack_error
        self._lock = threading.RLock()
        self._guards: weakref.WeakSet[Guard] = weakref.WeakSet()
        self._failed: deque[Report] = deque(maxlen=_QUEUE_LIMIT)
        self._untold: deque[Report] = deque()
        self.callbacks: tuple[Callable[[BaseException], object], ...] = ()
        """Called with each error as well."""
        agent.receiver.on(Kind.FAILED, self._on_message, inline=True)
        references.before_flush = self._tell_creators
        self._timer = agent.timers.add(self.tick)

    def guard(self, error: BaseException, call: PendingCall) -> Guard | None:
        """Returns a guard for the error of this worker's call; None if it needs no report."""
        if isinstance(error, _UNTOLD):
            return None
        name = function_name(call.function)
        return self._keep(Report(_CALL.format(name, call.worker_name), error))

    def guard_value(self, error: BaseException, creator: Peer) -> Guard | None:
        """Returns a guard for a value that could not be made for ``creator``, or None."""
        if isinstance(error, _UNTOLD):
            return None
        if creator.is_self:
            return self._keep(Report(_VALUE.format(creator.name), error))
        return self._keep(Report("", self._pack_error(creator, error), creator))

    def _keep(self, report: Report) -> Guard:
        guard = Guard(report, self._enqueue)
        with self._lock:
            self._guards.add(guard)
        return guard

    def _enqueue(self, report: Report) -> None:
        """Queues a report; called by finalizers."""
        (self._failed if report.creator is None else self._untold).append(report)
        self._timer.wake_by(0.0)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        self._failed.append(Report(_VALUE.format(peer.name), bytes(frame.control)))
        self._agent.reactor.submit_task(self._log_task)

    def _tell_creators(self) -> None:
        """Sends the reports for creators, before the messages that end their references."""
        for _, content, creator in _taken(self._untold):
            assert creator is not None
            assert isinstance(content, bytes)
            try:
                self._agent.sender.post(creator, encode_frame(Kind.FAILED, 0, 0, content))
            except Exception:  # The other reports, and the references behind them, go out.
                log_exception("an error could not be reported to worker %r", creator.name)

    def tick(self, now_s: float) -> float:
        """Empties the queues; a job of the timers."""
        self._tell_creators()
        if self._failed:
            # As a task: the program's logging handlers may block.
            self._agent.reactor.submit_task(self._log_task)
        return math.inf

    def close(self) -> None:
        """Reports the errors not looked at so far, because this worker leaves."""
        with self._lock:
            guards = list(self._guards)
        for guard in guards:
            guard.trip()
        self._log_task()

    def _log_task(self, *nothing: object) -> None:
        found = [
            (text, self._unpack_error(error) if isinstance(error, bytes) else error)
            for text, error, _ in _taken(self._failed)
        ]
        _log_unseen(found)
        for _, each in found:
            for callback in self.callbacks:
                try:
                    callback(each)
                except BaseException:
                    log_exception("a callback of on_unseen_error failed")


def _taken(queue: deque[Report]) -> Iterator[Report]:
    """Empties a queue from which other threads take as well."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


def _log_unseen(reports: Iterable[tuple[str, BaseException]]) -> None:
    """Logs reports; merges equal reports."""
    errors: dict[tuple[str, str], BaseException] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for text, error in reports:
        key = (text, shown(error))
        errors.setdefault(key, error)
        counts[key] += 1
    for key in list(errors)[:_SHOWN_LIMIT]:
        times = f" ({counts[key]} times)" if counts[key] > 1 else ""
        _log.error("%s%s", key[0], times, exc_info=errors[key])
    if len(errors) > _SHOWN_LIMIT:
        _log.error("%d more failed calls were never looked at", len(errors) - _SHOWN_LIMIT)
