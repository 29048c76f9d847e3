"""One worker's calls: how arguments and results become messages, and messages objects again."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.agent.agent import Agent
from weft.agent.calls import PendingCall
from weft.agent.parcels import Parcel, ParcelService
from weft.agent.peers import Peer
from weft.agent.references import ReferenceKeeper
from weft.autograd.contexts import Context, Contexts, current_id
from weft.autograd.engine import Engine
from weft.autograd.envelopes import flags_in
from weft.errors import AutogradError, NotInitialized, ProtocolError, ReferenceGone
from weft.rpc import others
from weft.rpc.coroutines import CoroutineRunner
from weft.rpc.handles import RRef
from weft.rpc.options import RpcBackendOptions
from weft.rpc.own_tensors import own_copy
from weft.rpc.requests import CompactRequest, Request
from weft.serialize import compact
from weft.serialize.exceptions import pack_error, unpack_error
from weft.serialize.functions import name_of
from weft.serialize.objects import Packed, pack, pack_plain, unpack
from weft.serialize.reading import TRUSTING, Reader, make_reader
from weft.wire.frames import Buffer, Frame
from weft.wire.messages import (
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

_log = logging.getLogger("weft")


class Worker:
    """What one worker needs for making and serving calls.

    Args:
        agent: Its agent.
        options: What it was told when it joined.
    """

    def __init__(self, agent: Agent, options: RpcBackendOptions | None = None) -> None:
        self.agent = agent
        self.reference_type: type[RRef[Any]] = RRef if options is None else options.reference_type
        self.copies_own = options is not None and options.copy_to_self
        self.reader = TRUSTING
        """What it makes of messages of others; its own it trusts."""
        if options is not None:
            self.reader = make_reader(options.allowed_modules, options.strict, agent.info.name)
        agent.parts[Reader] = self.reader
        self.parcels = ParcelService(agent)
        self.references = ReferenceKeeper(agent)
        self.engine = Engine(agent, self.parcels)
        self.contexts: Contexts = self.engine.contexts
        self.coroutines = CoroutineRunner(f"weft-{agent.info.name}-asyncio")
        self.unfinished: set[object] = set()
        """Calls of others that make values; a coroutine's call holds no thread meanwhile."""
        self._encoders: dict[int, Callable[[Any], bytes | None]] = {}
        self._packers: dict[int, Callable[[object], Packed]] = {}
        agent.members.on_joined(self._learn_to_encode)
        self._decode_other = others.decoder(self)
        self.slow: set[bytes] = set()
        """Names of functions that took long the last time."""
        self.has_left = False
        """Whether this process is this worker no more, though it may still serve for a moment."""
        self.on_failure: Callable[[Peer, BaseException], None] | None = None
        """Is told of every call that failed here, and who made it."""
        agent.discard = self.discard_reply
        agent.parts[Worker] = self
        agent.parts[Engine] = self.engine

    def _learn_to_encode(self, peer: Peer) -> None:
        self._encoders[peer.id] = others.encoder(peer)
        packer = pack_plain if peer.registration.is_strict and not peer.is_self else pack
        self._packers[peer.id] = partial(packer, main_by_name=peer.main_by_name)

    def close(self, limit_s: float) -> None:
        """Ends the threads that the parts have; the agent is closed separately.

        Args:
            limit_s: How long to wait for coroutines, and for tensors on their way.
        """
        end_s = time.monotonic() + limit_s
        self.coroutines.close(limit_s)
        self.parcels.close(end_s - time.monotonic())

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
        """Turns a call into a request that can be sent; what it hands on is kept alive from now.

        Args:
            peer: Who is to run it.
            function: The callable, or its name.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout_s: What the callee is told of the caller's patience.
            creation: Number of the reference that the result is for.

        Raises:
            SerializationError: The callable or an argument cannot travel.
        """
        name = function if isinstance(function, bytes) else name_of(function, peer.main_by_name)
        if name is not None and not kwargs and not peer.is_self:
            differentiable: list[Tensor] = []
            # Nobody waits for what makes a reference: what it hands on must keep itself alive.
            is_waited_for = creation == NO_CREATION
            encode_other = self._encoders[peer.id] if is_waited_for else compact.nothing_else
            values = compact.encode(args, differentiable, encode_other)
            if values is not None:
                context_id, message_id = current_id(), 0
                if context_id:
                    context_id, message_id = self._record_call(context_id, differentiable, peer)
                return CompactRequest(timeout_s, creation, context_id, message_id, name, values)
        content = (args, kwargs) if name is not None else (args, kwargs, function)
        packed = self._packers[peer.id](content)
        context_id, message_id = self._record_call(current_id(), packed.tensors, peer)
        references = self._hand_on(packed.externals, peer)
        head = encode_call_head(
            CallHead(timeout_s, creation, context_id, message_id, name or b"", references)
        )
        return Request(self, peer, head, packed, references)

    def pack_for(self, peers: Collection[Peer], value: object) -> Packed:
        """Packs a value once so that each of some workers can read it, now or later.

        What holds references to values must not be kept: each is counted when it is sent.

        Args:
            peers: The workers.
            value: What ``pack`` takes; or ``pack_plain``, where one of them is strict.

        Raises:
            SerializationError: Some part of it cannot travel.
        """
        registrations = [peer.registration for peer in peers if not peer.is_self]
        packer = pack_plain if any(each.is_strict for each in registrations) else pack
        return packer(value, main_by_name=all(peer.main_by_name for peer in peers))

    def _record_call(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer
    ) -> tuple[int, int]:
        # Neither the arguments nor the result of a call under no_grad are part of a graph.
        if not torch.is_grad_enabled():
            return 0, 0
        return self._record_send(context_id, tensors, peer)

    def _record_send(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer
    ) -> tuple[int, int]:
        """Returns the context that a message belongs to and its number in it; 0 for none."""
        # To oneself, tensors go by reference and stay in the graph that they are in.
        if not context_id or peer.is_self:
            return context_id, 0
        try:
            context = self.contexts.get_or_create(context_id)
            return context_id, context.record_send(tensors, peer.id)
        except AutogradError:  # A call that outlives its context goes on without it.
            return 0, 0

    def _hand_on(self, externals: Sequence[object], peer: Peer) -> tuple[HandedReference, ...]:
        handed = []
        for reference in externals:
            assert isinstance(reference, RRef)
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
            for place in differentiable:
                values[place].requires_grad_()
            return values
        context.place_received(message_id, peer.id, values, differentiable, is_answer)
        return values

    def _context_of(self, context_id: int, peer: Peer) -> Context | None:
        """Returns the context of a message from ``peer``, which is told when it ends.

        None where it has been released already: the call may have other effects.
        """
        try:
            context = self.contexts.get_or_create(context_id)
            context.add_known_worker(peer.id)
        except AutogradError:
            return None
        return context

    def open_content(
        self,
        peer: Peer,
        parcel: Parcel,
        references: Sequence[HandedReference],
        context_id: int,
        message_id: int,
        is_answer: bool = False,
    ) -> Any:
        """Returns the object that a message carries, its references and tensors in place."""
        externals: Sequence[object]
        read = self.reader.unpack
        if parcel.is_local:
            assert parcel.externals is not None
            externals, read = parcel.externals, unpack
        else:
            externals = [self._receive(handed, peer) for handed in references]
        tensors = self._receive_tensors(peer, parcel, context_id, message_id, is_answer)
        return read(parcel.payload, tensors, externals)

    def _receive(self, handed: HandedReference, sender: Peer) -> RRef[Any]:
        if not self.references.received(handed, sender):
            raise ReferenceGone(
                f"{handed.reference} arrived after this worker had dropped its references"
            )
        return self.reference_type.from_received(self.references, handed.reference)

    def _receive_tensors(
        self, peer: Peer, parcel: Parcel, context_id: int, message_id: int, is_answer: bool
    ) -> list[Tensor]:
        if peer.is_self:
            tensors = parcel.tensors(detached=False)
            return [own_copy(each, context_id) for each in tensors] if self.copies_own else tensors
        if not context_id:
            return parcel.tensors(detached=False)
        context = self._context_of(context_id, peer)
        if context is None or not message_id:
            return parcel.tensors(detached=False)
        tensors = parcel.tensors(detached=True)
        return context.record_receive(message_id, peer.id, tensors, flags_in(parcel), is_answer)

    def refuse(self, peer: Peer, references: Sequence[HandedReference]) -> None:
        """Gives back the references of a message that nobody will read."""
        for handed in references:
            self.references.refused(handed, peer)

    # Replies

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        """Sends the result of a call; an error instead, where it cannot travel."""
        differentiable: list[Tensor] = []
        values = None if peer.is_self else compact.encode((result,), differentiable)
        if values is not None:
            message_id = 0
            if context_id:
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
        except Exception as error:
            self.reply_error(peer, number, error)
            return
        head = encode_reply_head(ReplyHead(context_id, message_id, references))
        reply = Request(self, peer, head, packed, references, Kind.REPLY)
        try:
            self.agent.send(peer, reply.message(number))
        except ConnectionError:
            reply.take_back()  # The caller is lost, and nobody waits.
        except Exception as error:
            reply.take_back()
            self.reply_error(peer, number, error)

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        """Sends the error of a call."""
        if self.has_left and isinstance(error, (NotInitialized, CancelledError)):
            return  # Not the caller's business: it is told soon that this worker is lost.
        if self.on_failure is not None:
            self.on_failure(peer, error)
        payload = pack_error(
            error,
            self.agent.info.name,
            main_by_name=peer.main_by_name,
            is_plain=peer.registration.is_strict and not peer.is_self,
        )
        head = encode_reply_head(ReplyHead(0, 0, ()))
        message = self.parcels.seal(peer, Kind.REPLY, ERROR_REPLY, number, head, payload, ())
        try:
            self.agent.send(peer, message)
        except (ConnectionError, NotInitialized):
            _log.debug("the error of call %d goes nowhere: caller or this worker has left", number)

    def result_of(self, call: PendingCall) -> Any:
        """Returns what a call that is done has returned, or raises what it raised."""
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        call.frame = None  # Its memory belongs to the result from here on.
        peer = self.agent.peers[call.worker]
        if frame.flags == COMPACT:
            return self._compact_result(peer, frame)
        parcel = self.parcels.open(peer, frame)
        if frame.flags == ERROR_REPLY:
            read = unpack_error if parcel.is_local else self.reader.unpack_error
            raise read(bytes(parcel.payload))
        head = decode_reply_head(parcel.head)
        return self.open_content(
            peer, parcel, head.references, head.context_id, head.message_id, is_answer=True
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
        """Gives back what a reply carries that came too late."""
        if not frame.control or frame.flags == COMPACT:
            return  # Tensors sent again, for somebody who has given up; or nothing to give back.
        try:
            parcel = self.parcels.read(frame)
            self.parcels.discard(peer, parcel)
            if not parcel.is_local:
                self.refuse(peer, decode_reply_head(parcel.head).references)
        except ProtocolError:
            _log.debug("a late reply of worker %r cannot be read", peer.name)
