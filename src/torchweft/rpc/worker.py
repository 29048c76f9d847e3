"""Encodes one worker's calls and results as messages, and decodes received messages."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweft.agent.agent import Agent, Slot
from torchweft.agent.calls import PendingCall
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import TensorMessage, TensorMessages
from torchweft.autograd.contexts import Context, Contexts, current_id
from torchweft.autograd.engine import Engine
from torchweft.autograd.envelopes import flags_in
from torchweft.autograd.outside import NO_GRAD, Arrivals
from torchweft.errors import AutogradError, NotInitialized, ProtocolError, ReferenceGone
from torchweft.protocol.calls import SlowFunctions
from torchweft.protocol.membership.registration import why_not_by_value
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.handles import Handle
from torchweft.rpc.requests import CompactRequest, Request, own_copy, value_decoder, value_encoder
from torchweft.rpc.unseen import UnseenErrors
from torchweft.runtime.reports import log_exception
from torchweft.serialize import compact
from torchweft.serialize.exceptions import pack_error, unpack_error
from torchweft.serialize.functions import name_of
from torchweft.serialize.objects import Packed, pack, pack_plain, unpack
from torchweft.serialize.reading import TRUSTING, Reader
from torchweft.wire.frames import Buffer, Frame
from torchweft.wire.messages import (
    COMPACT,
    ERROR_REPLY,
    NO_CREATION,
    CallHead,
    HandedReference,
    Kind,
    ReplyHead,
    decode_compact_reply,
    decode_reply_head,
    encode_call_head,
    encode_compact_reply,
    encode_reply_head,
)

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
        # Hot path (once per call with tensors): a partial, not a Python function.
        self._new_request = partial(
            Request, self.tensor_messages, self.references, self.engine.outside
        )
        self.contexts: Contexts = self.engine.contexts
        self.arrivals = Arrivals(self.engine.outside, warns_of_lost_gradients)
        self.coroutines = CoroutineRunner(f"weft-{agent.info.name}-asyncio")
        self.unfinished: set[object] = set()
        """Served calls that make values; a coroutine's call holds no thread while it runs."""
        self._encoders: dict[int, Callable[[Any], bytes | None]] = {}
        self._packers: dict[int, Callable[[object], Packed]] = {}
        agent.members.on_joined(self._learn_to_encode)
        self._decode_other = value_decoder(reader, self.references, reference_type)
        self.slow = SlowFunctions()
        self.has_left = False
        """Whether this process has left its group, though it may still serve for a moment."""
        self.as_raised_here: Callable[[BaseException], BaseException] = lambda error: error
        """Returns the error to raise in the program in place of another worker's error."""
        self.unseen = UnseenErrors(agent, self.references, reader.unpack_error, self.pack_error)
        self.on_failure: Callable[[Peer, BaseException], None] | None = None
        """Called with the caller and the error of every call that failed here."""
        agent.receiver.discard = self.discard_reply

    def _learn_to_encode(self, peer: Peer) -> None:
        self._encoders[peer.id] = value_encoder(peer)
        by_name = peer.main_by_name
        if peer.registration.is_strict and not peer.is_self:
            self._packers[peer.id] = partial(pack_plain, main_by_name=by_name)
        else:
            obstacle = why_not_by_value(self.agent.me.registration, peer.registration)
            self._packers[peer.id] = partial(pack, main_by_name=by_name, not_by_value=obstacle)

    def close(self, limit_s: float) -> None:
        """Ends the threads of the parts; the agent is closed separately.

        Args:
            limit_s: Seconds to wait for coroutines, and for tensors in transit.
        """
        end_s = time.monotonic() + limit_s
        self.coroutines.close(limit_s)
        self.tensor_messages.close(end_s - time.monotonic())

    # Requests

    def request(
        self,
        peer: Peer,
        function: Callable[..., Any] | bytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout_s: float,
        creation: int = NO_CREATION,
    ) -> Request | CompactRequest:
        """Encodes a call as a request; values that it hands on are kept alive from now on.

        Args:
            peer: The callee.
            function: The callable, or its name.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout_s: The caller's time limit, in seconds, as the callee is told it.
            creation: Number of the reference that the result is for.

        Raises:
            SerializationError: The callable or an argument cannot be serialized.
        """
        name = function if isinstance(function, bytes) else name_of(function, peer.main_by_name)
        if name is not None and not kwargs and not peer.is_self:
            differentiable: list[Tensor] = []
            # No caller waits for a remote() call or keeps its references: hand them on instead.
            is_waited_for = creation == NO_CREATION
            encode_other = self._encoders[peer.id] if is_waited_for else compact.nothing_else
            values = compact.encode(args, differentiable, encode_other)
            if values is not None:
                context_id, message_id = current_id(), 0
                if not torch.is_grad_enabled():
                    context_id = self.arrivals.no_grad_id
                elif context_id or differentiable:
                    context_id, message_id = self._record_send(context_id, differentiable, peer)
                return CompactRequest(
                    self.engine.outside,
                    timeout_s,
                    creation,
                    context_id,
                    message_id,
                    name,
                    values,
                )
        content = (args, kwargs) if name is not None else (args, kwargs, function)
        packed = self._packers[peer.id](content)
        context_id, message_id = self._record_call(current_id(), packed.tensors, peer)
        references = self._hand_on(packed.externals, peer)
        head = encode_call_head(
            CallHead(timeout_s, creation, context_id, message_id, name or b"", references)
        )
        return self._new_request(peer, head, packed, references, message_id)

    def pack_for(self, peers: Collection[Peer], value: object) -> Packed:
        """Packs a value once so that each of ``peers`` can read it, now or later.

        Do not keep a packed value that contains references: each is counted when it is sent.

        Args:
            peers: The receivers.
            value: Any value for ``pack``, or for ``pack_plain`` if a receiver is strict.

        Raises:
            SerializationError: A part of the value cannot be serialized.
        """
        registrations = [peer.registration for peer in peers if not peer.is_self]
        by_name = all(peer.main_by_name for peer in peers)
        if any(each.is_strict for each in registrations):
            return pack_plain(value, main_by_name=by_name)
        obstacles = [why_not_by_value(self.agent.me.registration, each) for each in registrations]
        obstacle = next(filter(None, obstacles), "")
        return pack(value, main_by_name=by_name, not_by_value=obstacle)

    def _record_call(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer
    ) -> tuple[int, int]:
        # Neither the arguments nor the result of a call under no_grad are part of a graph.
        if not torch.is_grad_enabled():
            return 0 if peer.is_self else self.arrivals.no_grad_id, 0
        return self._record_send(context_id, tensors, peer)

    def _record_send(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer
    ) -> tuple[int, int]:
        """Returns a message's context id and its message id; 0 where there is none."""
        # A message to oneself carries tensors by reference, so they stay in their graph.
        if context_id == NO_GRAD or peer.is_self:
            return context_id, 0
        if context_id:
            try:
                context = self.contexts.get_or_create(context_id)
                return context_id, context.record_send(tensors, peer.id)
            except AutogradError:
                pass  # The call has outlived its context: send it without.
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                return 0, self._record_outside(tensors, peer)
        return 0, 0

    def _record_outside(self, tensors: Sequence[Tensor], peer: Peer) -> int:
        if not self.arrivals.keeps_graphs:
            return 0
        outside = self.engine.outside
        computed = [each for each in tensors if each.requires_grad and not each.is_leaf]
        message_id = outside.record_send(computed, peer.id)
        if peer.lost is not None:  # Race: its records may have been dropped before.
            outside.take_back(message_id)
        return message_id

    def _hand_on(self, externals: Sequence[object], peer: Peer) -> tuple[HandedReference, ...]:
        handed = []
        for reference in externals:
            assert isinstance(reference, Handle)
            reference.check_travels()
            if not peer.is_self:
                handed.append(self.references.hand_on(reference.id, peer))
        return tuple(handed)

    # What arrives

    def open_values(
        self,
        peer: Peer,
        control: Buffer,
        start: int,
        context_id: int,
        message_id: int,
        is_answer: bool = False,
    ) -> list[Any]:
        """Returns the values of a compact message, which begin at ``start``."""
        differentiable: list[int] = []
        values = compact.decode(control, start, differentiable, self._decode_other)
        context = self._context_of(context_id, peer) if context_id else None
        if not differentiable:
            return values
        if context is None or not message_id:
            computed = [place for place in differentiable if not values[place].requires_grad]
            self.arrivals.place(values, computed, peer.name, peer.id, context_id, message_id)
            return values
        context.place_received(message_id, peer.id, values, differentiable, is_answer)
        return values

    def _context_of(self, context_id: int, peer: Peer) -> Context | None:
        """Returns the context of a message, whose release ``peer`` will be told of.

        Returns None, and does not raise, if the context was released: the call may have
        other effects.
        """
        if context_id == NO_GRAD:
            return None
        try:
            context = self.contexts.get_or_create(context_id)
            context.add_known_worker(peer.id)
        except AutogradError:
            return None
        return context

    def open_content(
        self,
        peer: Peer,
        message: TensorMessage,
        references: Sequence[HandedReference],
        context_id: int,
        message_id: int,
        is_answer: bool = False,
    ) -> Any:
        """Returns the object in a message, with its references and tensors in place."""
        externals: Sequence[object]
        read = self.reader.unpack
        if message.is_local:
            assert message.externals is not None
            externals, read = message.externals, unpack
        else:
            externals = [self._receive(handed, peer) for handed in references]
        tensors = self._receive_tensors(peer, message, context_id, message_id, is_answer)
        return read(message.payload, tensors, externals)

    def _receive(self, handed: HandedReference, sender: Peer) -> Handle:
        if not self.references.received(handed, sender):
            raise ReferenceGone(
                f"{handed.reference} arrived after this worker had dropped its references"
            )
        return self.reference_type.from_received(self.references, handed.reference)

    def _receive_tensors(
        self, peer: Peer, message: TensorMessage, context_id: int, message_id: int, is_answer: bool
    ) -> list[Tensor]:
        if peer.is_self:
            tensors = message.tensors(detached=False)
            if not self.copies_own:
                return tensors
            keeps = self.arrivals.keeps_graphs
            return [own_copy(each, context_id, keeps) for each in tensors]
        context = self._context_of(context_id, peer) if context_id else None
        if context is None or not message_id:
            try:
                tensors = message.tensors(detached=False)
                if message.some_are_computed:
                    self._place_computed(peer, message, tensors, context_id, message_id)
                return tensors
            except BaseException:
                self.give_back(peer, context_id, message_id)
                raise
        tensors = message.tensors(detached=True)
        return context.record_receive(message_id, peer.id, tensors, flags_in(message), is_answer)

    def _place_computed(
        self,
        peer: Peer,
        message: TensorMessage,
        tensors: list[Tensor],
        context_id: int,
        message_id: int,
    ) -> None:
        """Marks tensors with a graph at the sender, in a message outside of contexts."""
        flags = message.flags()
        computed = [place for place, flag in enumerate(flags) if flag.is_computed]
        for place in computed:
            if flags[place].is_shared:  # As in a context: separate graphs need separate memory.
                tensors[place] = tensors[place].detach().clone()
        self.arrivals.place(tensors, computed, peer.name, peer.id, context_id, message_id)

    def refuse(
        self,
        peer: Peer,
        references: Sequence[HandedReference],
        context_id: int = 0,
        message_id: int = 0,
    ) -> None:
        """Releases the references and the graph that an unread message holds at its sender."""
        for handed in references:
            self.references.refused(handed, peer)
        self.give_back(peer, context_id, message_id)

    def give_back(self, peer: Peer, context_id: int, message_id: int) -> None:
        """Makes the sender of a message that was not received release its graph."""
        if message_id and not context_id:  # Records of a context end with it.
            self.engine.outside.give_back(peer.id, message_id)

    # Replies

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        """Sends the result of a call, or an error if the result cannot be serialized."""
        differentiable: list[Tensor] = []
        values = None if peer.is_self else compact.encode((result,), differentiable)
        if values is not None:
            message_id = 0
            if context_id or differentiable:
                context_id, message_id = self._record_send(context_id, differentiable, peer)
            message = encode_compact_reply(number, context_id, message_id, values)
            try:
                self.agent.answers.send(peer, message)
            except (ConnectionError, NotInitialized):
                _log.debug("the result of call %d goes nowhere: one of the two has left", number)
            return
        try:
            packed = self._packers[peer.id](result)
            context_id, message_id = self._record_send(context_id, packed.tensors, peer)
            references = self._hand_on(packed.externals, peer)
        except BaseException as error:  # The result's own code may even exit.
            self.reply_error(peer, number, error)
            return
        head = encode_reply_head(ReplyHead(context_id, message_id, references))
        reply = self._new_request(peer, head, packed, references, message_id, Kind.REPLY)
        try:
            self.agent.sender.send(peer, reply.message(number))
        except ConnectionError:
            reply.take_back()  # The caller is lost, and nobody waits.
        except BaseException as error:
            reply.take_back()
            self.reply_error(peer, number, error)

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        """Sends the error of a call."""
        if self.has_left and isinstance(error, (NotInitialized, CancelledError)):
            return  # The caller is told soon that this worker is lost.
        self.note_failure(peer, error)
        payload = self.pack_error(peer, error)
        head = encode_reply_head(ReplyHead(0, 0, ()))
        message = self.tensor_messages.encode(
            peer, Kind.REPLY, ERROR_REPLY, number, head, payload, ()
        )
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

    def result_of(self, call: PendingCall) -> Any:
        """Returns the result of a call that is done, or raises its error."""
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        call.frame = None  # Its memory belongs to the result from here on.
        peer = self.agent.peers[call.worker]
        if frame.flags == COMPACT:
            return self._compact_result(peer, frame)
        message = self.tensor_messages.decode(peer, frame)
        if frame.flags == ERROR_REPLY:
            read = unpack_error if message.is_local else self.reader.unpack_error
            raise self.as_raised_here(read(bytes(message.payload)))
        head = decode_reply_head(message.head)
        return self.open_content(
            peer, message, head.references, head.context_id, head.message_id, is_answer=True
        )

    def _compact_result(self, peer: Peer, frame: Frame) -> Any:
        context_id, message_id, start = decode_compact_reply(frame.control)
        values = self.open_values(
            peer, frame.control, start, context_id, message_id, is_answer=True
        )
        if len(values) != 1:
            raise ProtocolError(f"a call was answered with {len(values)} values")
        return values[0]

    def discard_reply(self, peer: Peer, frame: Frame) -> None:
        """Discards a late reply, and releases what it holds at its sender."""
        if not frame.control:
            return  # Retransmitted tensors, for a call that was given up.
        try:
            if frame.flags == COMPACT:
                context_id, message_id, _ = decode_compact_reply(frame.control)
                self.give_back(peer, context_id, message_id)
                return
            message = self.tensor_messages.read(frame)
            self.tensor_messages.discard(peer, message)
            if not message.is_local:
                head = decode_reply_head(message.head)
                self.refuse(peer, head.references, head.context_id, head.message_id)
        except ProtocolError:
            _log.debug("a late reply of worker %r cannot be read", peer.name)


WORKER: Slot[Worker] = Slot()


def current_worker() -> Worker:
    """Returns the worker of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current().slots[WORKER]
