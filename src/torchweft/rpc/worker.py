"""One worker's calls: the parts that make and serve them, and the results of its own calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchweft.agent.agent import SERVED_STREAMS, Agent, Slot
from torchweft.agent.calls import PendingCall
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import LocalMessage, TensorMessages
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.engine import Engine
from torchweft.autograd.outside import Arrivals
from torchweft.errors import ProtocolError
from torchweft.protocol.calls import AnsweredCall, SlowFunctions
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.decoding import Decoder
from torchweft.rpc.encoding import Encoder
from torchweft.rpc.handles import Handle
from torchweft.rpc.replies import Replies
from torchweft.rpc.unseen import UnseenErrors
from torchweft.rpc.watching import Carrier, Watcher
from torchweft.runtime.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.serialize.exceptions import unpack_error
from torchweft.serialize.reading import TRUSTING, Reader
from torchweft.wire.frames import Frame
from torchweft.wire.messages import ERROR_REPLY, TABLES, decode_reply

_log = logging.getLogger("torchweft")

_is_in_inference_mode = torch.is_inference_mode_enabled
_InferenceMode: Any = getattr(torch._C, "_InferenceMode")  # noqa: B009 (its stub lacks it)


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
        self.coroutines = CoroutineRunner(
            f"weft-{agent.info.name}-asyncio", agent.slots[SERVED_STREAMS]
        )
        self.unfinished: set[AnsweredCall] = set()
        """Served calls that make values; a coroutine's call holds no thread while it runs."""
        tensors, references, outside = self.tensor_messages, self.references, self.engine.outside
        graphs = (self.contexts, outside, self.arrivals)
        self.encoder = Encoder(agent, tensors, references, *graphs)
        self.decoder = Decoder(agent, reader, references, reference_type, *graphs, copies_own)
        self.replies = Replies(agent, self.encoder, tensors)
        # What every served call needs.
        self.reply, self.reply_error = self.replies.reply, self.replies.reply_error
        self.slow = SlowFunctions()
        self.as_raised_here: Callable[[BaseException], BaseException] = lambda error: error
        """Returns the error to raise in the program in place of another worker's error."""
        self.unseen = UnseenErrors(
            agent, self.references, reader.unpack_error, self.replies.pack_error
        )
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

    def result_of(self, call: PendingCall) -> Any:
        """Returns the result of a call that is done, or raises its error.

        The waiting thread reads an answer, or a thread of the worker does. Both make the same
        tensors of it: the inference mode of the waiting thread has no effect on them. If it is
        interrupted before it has begun, ``call.frame`` stays.
        """
        if _is_in_inference_mode():
            with _InferenceMode(False):
                return Worker.result_of(self, call)
        if has_dispatch_modes() or has_function_modes():
            with plain_operations():
                return Worker.result_of(self, call)
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        peer = self.agent.peers[call.worker]
        flags = frame.flags
        control: Any = frame.control
        if type(control) is LocalMessage:
            call.frame = None
            if flags & ERROR_REPLY:
                raise self._error_of(call, unpack_error, control.payload)
            return self.decoder.open_own(control, control.head[0], is_answer=True)
        if flags & ERROR_REPLY:
            call.frame = None
            head = decode_reply(control)
            payload = bytes(control[head[3] : head[4]])
            raise self._error_of(call, self.reader.unpack_error, payload)
        try:
            call.frame = None  # Its memory belongs to the result from here on.
            head = decode_reply(control)
            message = None
            if flags:
                message = self.tensor_messages.read(frame)
                self.tensor_messages.fetch(peer, message)
            return self.decoder.open(peer, control, head, message, is_answer=True)
        except BaseException:
            self.decoder.refuse(peer, decode_reply(control))  # Received references stay so.
            raise

    def _error_of(
        self, call: PendingCall, unpack: Callable[[bytes], BaseException], payload: bytes
    ) -> BaseException:
        """Returns the error that answers a call, or the one with which it cannot be read."""
        try:
            error = self.as_raised_here(unpack(payload))
        except BaseException as unreadable:
            error = unreadable
        for each in call.watchers:
            each.call_fails(call, error)
        return error

    def discard_reply(self, peer: Peer, frame: Frame) -> None:
        """Discards a late reply, and releases what it holds at its sender."""
        if not frame.control or isinstance(frame.control, LocalMessage):
            return  # Retransmitted tensors, for a call that was given up; or a message to itself.
        try:
            if frame.flags & TABLES:
                self.tensor_messages.discard(peer, self.tensor_messages.read(frame))
            self.decoder.refuse(peer, decode_reply(frame.control))
        except ProtocolError:
            _log.debug("a late reply of worker %r cannot be read", peer.name)


WORKER: Slot[Worker] = Slot()


def current_worker() -> Worker:
    """Returns the worker of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current().slots[WORKER]
