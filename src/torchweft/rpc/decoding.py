"""Decodes the messages that one worker receives: values, and the results and errors of calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.autograd.contexts import Context
from torchweft.autograd.engine import Engine
from torchweft.autograd.outside import Arrivals
from torchweft.engine.codec.exceptions import unpack_error
from torchweft.engine.codec.objects import unpack
from torchweft.engine.codec.reading import Reader
from torchweft.engine.codec.tensors import (
    COMPUTED,
    SHARED,
    STRIDED,
    decode_tensors,
    separated,
    too_many,
    with_flags,
)
from torchweft.engine.codec.values import PICKLE, decode, refusal_of, unfolded_limit
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.engine.wire import messages
from torchweft.engine.wire.frames import Buffer, Frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    NO_CONTEXTS,
    NO_GRAD,
    TABLES,
    HandedReference,
    ValueHead,
    decode_reply,
)
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle, ReferenceKeeper
from torchweft.engine.worker.tensor_messages import (
    LocalMessage,
    TensorMessage,
    TensorMessages,
    own_copy,
)
from torchweft.errors import AutogradError, ProtocolError, ReferenceGone
from torchweft.ids import WORKER_SHIFT, ReferenceId
from torchweft.native import native

_log = logging.getLogger("torchweft")
_is_in_inference_mode = torch.is_inference_mode_enabled
_InferenceMode: Any = getattr(torch._C, "_InferenceMode")  # noqa: B009 (its stub lacks it)


_USUAL_FLAGS = (0, STRIDED)
"""Flags of a tensor that needs no closer look; those of the first one stand behind its dtype."""
decode_call = messages.decode_call if native is None else native.decode_call


class Decoder:
    """Makes values of messages: places tensors in their graphs, and takes references over.

    Args:
        agent: The worker's agent.
        reader: Decodes messages of other workers; messages to itself are trusted.
        tensor_messages: Fetches tensors that do not stand in their message.
        references: Counts references that arrive.
        reference_type: Class of the references that it makes.
        engine: Records the tensors that arrive in autograd contexts, and keeps the graphs of those
            that are sent outside of contexts.
        arrivals: Places tensors that arrive outside of contexts.
        copies_own: Whether tensors in calls of the worker to itself are copied.
    """

    def __init__(
        self,
        agent: Agent,
        reader: Reader,
        tensor_messages: TensorMessages,
        references: ReferenceKeeper,
        reference_type: type[Handle],
        engine: Engine,
        arrivals: Arrivals,
        copies_own: bool,
    ) -> None:
        self._agent = agent
        self._tensor_messages = tensor_messages
        self.as_raised_here: Callable[[BaseException], BaseException] = lambda error: error
        """Returns the error to raise in the program in place of another worker's error."""
        self._references = references
        self.reference_type = reference_type
        self._contexts, self._outside = engine.contexts, engine.outside
        self._arrivals = arrivals
        self._copies_own = copies_own
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        # Looked up once: every message needs them.
        self._unpack, self._resolve_value = reader.unpack, reader.resolve_value
        self._unpack_error = reader.unpack_error
        self._is_strict = reader.is_strict
        self.take_home = self._come_home
        """Returns the reference of this worker that has come home."""
        self._decode = None if native is None or reader.is_strict else native.decode_message

    def natively(self) -> tuple[Any, ...]:
        """Returns what the native twin takes to decode values here; empty if it may not."""
        if (
            self._decode is None
            or _is_in_inference_mode()
            or has_dispatch_modes()
            or has_function_modes()
        ):
            return ()
        return self._tensor_limit, self._resolve_value, self.take_home

    def result_of(self, call: PendingCall) -> Any:
        """Returns the result of a call that is done, or raises its error.

        The waiting thread reads an answer, or a thread of the worker does. Both make the same
        tensors of it: the inference mode of the waiting thread has no effect on them. If it is
        interrupted before it has begun, ``call.frame`` stays.
        """
        if _is_in_inference_mode():
            with _InferenceMode(False):
                return Decoder.result_of(self, call)
        if has_dispatch_modes() or has_function_modes():
            with plain_operations():
                return Decoder.result_of(self, call)
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        peer = self._agent.peers[call.worker]
        flags = frame.flags
        control: Any = frame.control
        is_own = type(control) is LocalMessage
        if self._decode is not None and not (flags or is_own):
            decodes = self._tensor_limit, self._resolve_value, self.take_home
            try:
                value = native.decode_answer(frame, decodes)
            except Exception as error:
                if is_of_handler(error):
                    raise
                value = NotImplemented  # It comes again below.
            if value is not NotImplemented:
                call.frame = None
                return value
        if flags & ERROR_REPLY:
            call.frame = None
            if is_own:
                raise self._error_of(call, unpack_error, control.payload)
            *_, start, end = decode_reply(control)
            raise self._error_of(call, self._unpack_error, bytes(control[start:end]))
        if is_own:
            call.frame = None
            return self.open_own(control, control.head[0], is_answer=True)
        try:
            call.frame = None  # Its memory belongs to the result from here on.
            head = decode_reply(control)
            message = None
            if flags:
                message = self._tensor_messages.read(frame)
                self._tensor_messages.fetch(peer, message)
            return self.open(peer, control, head, message, is_answer=True)
        except BaseException:
            self.refuse(peer, decode_reply(control))  # Received references stay so.
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

    def discard(self, peer: Peer, frame: Frame) -> None:
        """Discards a late reply, and releases what it holds at its sender."""
        if not frame.control or isinstance(frame.control, LocalMessage):
            return  # Retransmitted tensors, for a call that was given up; or a message to itself.
        try:
            if frame.flags & TABLES:
                self._tensor_messages.discard(peer, self._tensor_messages.read(frame))
            self.refuse(peer, decode_reply(frame.control))
        except ProtocolError:
            _log.debug("a late reply of worker %r cannot be read", peer.name)

    def open(
        self,
        peer: Peer,
        control: Buffer,
        head: ValueHead,
        message: TensorMessage | None,
        is_answer: bool = False,
    ) -> Any:
        """Returns the value in a message of another worker, with references and tensors in place.

        Args:
            peer: The sender.
            control: The message.
            head: Its head.
            message: Its tensors, all fetched, if they came by tables.
            is_answer: Whether it is the result of a call.
        """
        context_id, message_id, references, start, end = head
        if (
            self._decode is not None
            and message is None
            and not (message_id or references)
            and context_id in NO_CONTEXTS
            and (start == end or control[start] != PICKLE)
            and (end + 1 >= len(control) or control[end + 1] in _USUAL_FLAGS)
        ):
            try:
                limit, resolve, take_home = self._tensor_limit, self._resolve_value, self.take_home
                value = self._decode(control, start, end, limit, resolve, take_home)
            except Exception as error:
                refusal = refusal_of(error)
                if refusal is None:
                    raise
                raise refusal from None
            if value is not NotImplemented:
                return value
        if message_id and message_id >> WORKER_SHIFT != peer.id:
            raise self._not_its_own(peer, message_id)
        externals: Sequence[object] = ()
        if references:
            externals = [self._receive(handed, peer) for handed in references]
        context = self._context_of(context_id, peer) if context_id else None
        tensors: Sequence[Tensor] = ()
        if message is not None or end < len(control):
            try:
                if message is None:
                    received, flags = decode_tensors(control, end)
                    if len(received) > self._tensor_limit:
                        raise too_many(self._tensor_limit, self._agent.info.name)
                else:
                    received, flags = message.tensors()
                if self._is_strict:
                    unfolded_limit(len(control) if message is None else 0, received)
                tensors = received
                if flags:
                    tensors = self._place(peer, received, flags, context, head, is_answer)
            except BaseException:
                self.give_back(peer, context_id, message_id)
                raise
        if start == end:  # As ``unpack`` does; most results are one tensor or None.
            return tensors[0] if tensors else None
        payload = control[start:end]
        if payload[0] == PICKLE:
            return self._unpack(payload, tensors, externals)
        limit_bytes = unfolded_limit(len(control), tensors) if self._is_strict else None
        return decode(payload, tensors, externals, self._resolve_value, self.take_home, limit_bytes)

    def _not_its_own(self, peer: Peer, message_id: int) -> ProtocolError:
        """Turns away a worker whose message has the number of another worker's message."""
        error = ProtocolError(f"it numbers a message {message_id}, a number of another worker")
        self._agent.receiver.turn_away(peer, error)
        return error

    def open_own(self, message: LocalMessage, context_id: int, is_answer: bool = False) -> Any:
        """Returns the value in a message of this worker to itself; see ``open``."""
        tensors = message.tensors
        device_streams.use(message.mark, tensors)
        if self._agent.me.device_maps.is_any:
            tensors = self._place_own(tensors, context_id, is_answer)
        elif self._copies_own:
            keeps = self._arrivals.keeps_graphs
            tensors = [own_copy(each, context_id, keeps) for each in tensors]
        return unpack(message.payload, tensors, message.externals)

    def _place_own(
        self, tensors: Sequence[Tensor], context_id: int, is_answer: bool
    ) -> list[Tensor]:
        """Returns tensors of a message to this worker itself on the devices of its own map."""
        maps, keeps = self._agent.me.device_maps, self._arrivals.keeps_graphs
        place = maps.back if is_answer else maps.forward
        placed = []
        for tensor in tensors:
            device = place(tensor.device)
            if self._copies_own or device != tensor.device:
                tensor = own_copy(tensor, context_id, keeps, device)
            placed.append(tensor)
        return placed

    def _context_of(self, context_id: int, peer: Peer) -> Context | None:
        """Returns the context of a message, whose release ``peer`` will be told of.

        Returns None, and does not raise, if the context was released: the call may have
        other effects.
        """
        if context_id == NO_GRAD:
            return None
        try:
            context = self._contexts.get_or_create(context_id, peer.id)
            context.add_known_worker(peer.id)
        except AutogradError:
            return None
        return context

    def _come_home(self, reference: ReferenceId) -> Handle:
        """Returns a reference to a value of this worker that the sender has kept meanwhile."""
        return self._handle(reference, self._references.came_home(reference))

    def _receive(self, handed: HandedReference, sender: Peer) -> Handle:
        return self._handle(handed.reference, self._references.received(handed, sender))

    def _handle(self, reference: ReferenceId, is_counted: bool) -> Handle:
        if not is_counted:
            raise ReferenceGone(f"{reference} arrived after this worker had dropped its references")
        return self.reference_type.from_received(self._references, reference)

    def _place(
        self,
        peer: Peer,
        tensors: list[Tensor],
        flags: Sequence[int],
        context: Context | None,
        head: ValueHead,
        is_answer: bool,
    ) -> list[Tensor]:
        """Places the tensors of a message in their graphs."""
        context_id, message_id, *_ = head
        if context is not None and message_id:
            return context.record_receive(message_id, peer.id, tensors, flags, is_answer)
        with_flags(tensors, flags)
        computed = [place for place, flag in enumerate(flags) if flag & COMPUTED]
        for place in computed:
            if flags[place] & SHARED:  # As in a context: separate graphs need separate memory.
                tensors[place] = separated(tensors[place].detach())
        if computed:
            self._arrivals.place(
                tensors, computed, peer.name, peer.id, context_id, message_id, is_answer
            )
        return tensors

    def refuse(self, peer: Peer, head: ValueHead) -> None:
        """Releases the references and the graph that an unread message holds at its sender."""
        context_id, message_id, references, *_ = head
        for handed in references:
            self._references.refused(handed, peer)
        self.give_back(peer, context_id, message_id)

    def give_back(self, peer: Peer, context_id: int, message_id: int) -> None:
        """Makes the sender of a message that was not received release its graph."""
        if not message_id or context_id:  # Records of a context end with it.
            return
        if message_id >> WORKER_SHIFT == peer.id:
            self._outside.give_back(peer.id, message_id)
        else:
            self._not_its_own(peer, message_id)
