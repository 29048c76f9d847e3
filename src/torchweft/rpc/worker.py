"""One worker's calls, references, tensors and graphs, its answers, and who watches its calls.

A worker has a tuple of watchers (counters, traces, spans), which is usually empty. Each step of a
call looks whether there are any, and tells them. A call that has begun before somebody watches has
no notes, and is told of without them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweft import knobs
from torchweft.autograd.codec import PassName
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.engine import Engine
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.outside import Arrivals
from torchweft.engine.codec.exceptions import pack_error
from torchweft.engine.codec.objects import Packed
from torchweft.engine.codec.reading import TRUSTING, Reader
from torchweft.engine.codec.tensors import shared_ranges
from torchweft.engine.codec.values import no_home
from torchweft.engine.protocol.backward import Progress
from torchweft.engine.protocol.calls import AnsweredCall, ServedCall, SlowFunctions
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Buffer, encode_frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
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
from torchweft.errors import NotInitialized, SerializationError
from torchweft.ids import ReferenceId
from torchweft.native import native
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.decoding import Decoder
from torchweft.rpc.encoding import Encoder
from torchweft.rpc.unseen import UnseenErrors


class Watcher:
    """Is told of the calls and backward passes of a worker, by any thread.

    Does nothing unless a method is overridden. It may keep something with a call in ``call.notes``,
    under itself.
    """

    # Calls that this worker makes

    def call_begins(self, call: PendingCall) -> bytes:
        """Is told of a call before its request is encoded.

        Returns:
            The context of a span that the call carries; empty for none.
        """
        return b""

    def call_ends(self, call: PendingCall) -> None:
        """Is told of an outcome before those that wait for it go on."""

    def call_fails(self, call: PendingCall, error: BaseException) -> None:
        """Is told of a call that was not sent, or of an error that was read as its answer."""

    def creation_sent(self, call: PendingCall, reference: ReferenceId) -> None:
        """Is told of a call that makes a value. Nobody waits for its answer."""

    # Calls that it serves

    def serving_begins(self, call: AnsweredCall) -> None:
        """Is told of a call whose turn has come, or that is refused."""

    def serving_ends(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Is told of the outcome of a served call before it is answered."""

    def served(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Is told of a served call after it was answered."""

    # Backward passes

    def pass_runs(self, context_id: int) -> contextlib.AbstractContextManager[object]:
        """Returns a block around a pass that this worker leads."""
        return contextlib.nullcontext()

    def part_runs(
        self, local: LocalPass, work: Callable[[], tuple[list[Any], Progress]]
    ) -> tuple[list[Any], Progress]:
        """Runs ``work``, a step of this worker's part of a pass, and returns its result."""
        return work()

    def messages_before(self, peer: Peer, name: PassName) -> list[Buffer]:
        """Returns the bytes of messages that stand before the next one of a pass to a worker."""
        return []

    def take_span(self, key: tuple[int, int], context: bytes) -> None:
        """Takes the numbers of a pass and its context, and its span, from another worker."""


class Carrier(Watcher):
    """A watcher by whom calls carry contexts. A worker has one at most."""

    def around(self, call: AnsweredCall, run: Callable[[], Any]) -> Any:
        """Runs what serves a call, or a part of that, in the context of the call."""
        return run()

    def run_batch(self, calls: Sequence[Any], function: Any, run: Callable[[], Any]) -> Any:
        """Runs the function of a batch of calls; returns its result."""
        return run()

    def context_here(self) -> object:
        """Returns the context of this thread, for a call of a batched function by it."""
        return None


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
        self.carrier: Carrier | None = None
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

    def watch(self, watcher: Watcher) -> None:
        """Has a watcher hear of calls and backward passes from now on. Thread-safe."""
        with self._watchers_lock:
            self._watch((*self.watchers, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        """Has a watcher hear of no further calls; nothing if it does not watch. Thread-safe."""
        with self._watchers_lock:
            self._watch(tuple(each for each in self.watchers if each is not watcher))

    def _watch(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = self.engine.passes.watchers = watchers
        self.carrier = next((each for each in watchers if isinstance(each, Carrier)), None)
        self.usual.clear()

    def note_call(self, call: PendingCall) -> bytes:
        """Tells the watchers of a call that begins; returns the span context that it carries."""
        call.watchers = watchers = self.watchers
        call.notes = {}
        return b"".join([each.call_begins(call) for each in watchers])

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
