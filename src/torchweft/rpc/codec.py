"""Encodes the calls and results of one worker as messages, and decodes those that it receives."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchweft import knobs
from torchweft.autograd.contexts import Context, current_id
from torchweft.autograd.engine import Engine
from torchweft.autograd.outside import Arrivals
from torchweft.engine.codec.exceptions import unpack_error
from torchweft.engine.codec.functions import name_of, resolve
from torchweft.engine.codec.makers import NO_MAKERS
from torchweft.engine.codec.objects import Packed, pack, pack_plain, plain_frame, unpack
from torchweft.engine.codec.reading import Reader
from torchweft.engine.codec.tensors import (
    COMPUTED,
    NO_MEMORY,
    NO_TENSORS,
    SHARED,
    Encoded,
    decode_tensors,
    encode_tensors,
    is_dense,
    separated,
    shared_ranges,
    too_many,
    with_flags,
)
from torchweft.engine.codec.values import (
    PICKLE,
    decode,
    encode,
    no_home,
    unfolded_limit,
)
from torchweft.engine.protocol.registration import why_not_by_value
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.threads.thread_modes import (
    check_untraced,
    has_dispatch_modes,
    has_function_modes,
    has_modes,
    plain_operations,
)
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, Buffer, Frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    NAMED,
    NO_CREATION,
    NO_GRAD,
    TABLES,
    HandedReference,
    Kind,
    ValueHead,
    decode_reply,
    encode_call,
    place_in_graph,
    split_names,
    with_names,
)
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import Handle, ReferenceKeeper
from torchweft.engine.worker.tensor_messages import (
    Apart,
    LocalMessage,
    TensorMessage,
    TensorMessages,
    own_copy,
)
from torchweft.errors import AutogradError, ProtocolError, ReferenceGone, SerializationError
from torchweft.ids import WORKER_SHIFT, ReferenceId
from torchweft.native import native

TakeBack = Callable[[Peer, Sequence[HandedReference], int], None]
"""Takes back the references and the graph of a message to a worker that could not be sent."""


@dataclass(slots=True, eq=False)
class Request:
    """A call, or values for a port, before it is sent.

    Attributes:
        undo: Called if the message cannot be sent.
        peer: The receiver.
        kind: ``CALL`` or ``POST``.
        flags: Flags of the frame.
        frame: The frame, without its header.
        message_id: The number of its tensors in their graph, or 0.
        handed: The references that the message hands on.
        apart: Makes the message where its tensors do not stand in the frame.
    """

    undo: TakeBack
    peer: Peer
    kind: Kind
    flags: int
    frame: bytearray
    message_id: int
    handed: Sequence[HandedReference] = ()
    apart: Apart | None = None

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call or port."""
        frame = self.frame
        if self.apart is not None:
            return self.apart.message(self.peer, self.kind, self.flags, number, frame)
        HEADER.pack_into(frame, 0, self.kind, self.flags, 0, len(frame) - HEADER_BYTES, number)
        return [frame]

    def take_back(self, *, keeps_graph: bool = False) -> None:
        """Takes back the references and the graph of a message that could not be sent.

        Args:
            keeps_graph: Whether the graph is kept, as the receiver may have the message.
        """
        self.undo(self.peer, self.handed, 0 if keeps_graph else self.message_id)


encode_whole = plain_frame if native is None else native.encode_call
"""Does as ``plain_frame``."""


_OWN = b"torchweft."
"""The beginning of the names of Weft's own functions."""


class Encoder:
    """Packs values for each receiver as it can read them, and hands on what they refer to.

    Args:
        agent: The worker's agent.
        tensor_messages: Encodes tensors that do not stand in their message.
        references: Counts references that are handed on.
        engine: Records the tensors that are sent, in autograd contexts and outside of them.
        arrivals: Says whether graphs outside of contexts are kept.
    """

    def __init__(
        self,
        agent: Agent,
        tensor_messages: TensorMessages,
        references: ReferenceKeeper,
        engine: Engine,
        arrivals: Arrivals,
    ) -> None:
        self._agent = agent
        self._tensor_messages = tensor_messages
        self._references = references
        self._contexts, self._outside = engine.contexts, engine.outside
        self._arrivals = arrivals
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        agent.members.on_joined(self._learn_to_encode)

    def _learn_to_encode(self, peer: Peer) -> None:
        by_name = peer.main_by_name
        if peer.registration.is_strict and not peer.is_self:
            peer.receiver |= NO_MAKERS
            peer.pack = peer.pickle = partial(pack_plain, main_by_name=by_name)
        else:
            obstacle = why_not_by_value(self._agent.me.registration, peer.registration)
            peer.not_by_value = obstacle
            peer.pack = partial(pack, main_by_name=by_name, not_by_value=obstacle)
            peer.pickle = partial(peer.pack, needs_pickle=True)
        owner = peer.id

        def home_of(value: Any) -> ReferenceId | None:
            if not isinstance(value, Handle) or value.id.owner != owner:
                return None
            value.check_travels()
            return value.id

        peer.home_of = home_of

    def request(
        self,
        peer: Peer,
        function: Callable[..., Any] | bytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout_s: float,
        creation: int = NO_CREATION,
        span: bytes = b"",
        kind: Kind = Kind.CALL,
    ) -> Request:
        """Encodes a call as a request; values that it hands on are kept alive from now on.

        Args:
            peer: The callee.
            function: The callable, or its name.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout_s: The caller's time limit, in seconds, as the callee is told it.
            creation: Number of the reference that the result is for.
            span: The context of the span that the call carries, if any.
            kind: The kind of message.

        Raises:
            SerializationError: The callable or an argument cannot be serialized, or a tensor has a
                tangent, or is on a device without an entry in the device map.
        """
        by_name = peer.main_by_name
        name = function if isinstance(function, bytes) else name_of(function, by_name)
        flags, values = (NAMED, with_names(args, kwargs)) if kwargs else (0, tuple(args))
        # No caller waits for a remote() call or keeps its references: hand them on.
        home_of = peer.home_of if creation == NO_CREATION else no_home
        head = timeout_s, creation, name or b"", span
        tensors: list[Tensor] = []
        made: tuple[bytearray, bool | None] | Literal[False] | None = None
        if name is not None and not peer.is_self:
            inlines = not (peer.device_maps.moves_host_of_calls or shared_ranges)
            made = encode_whole(*head, values, tensors, peer.receiver, home_of, inlines)
        if not made:
            if has_modes():
                check_untraced()
                with plain_operations():
                    self._check_whole(peer, values)
                    again = peer, function, args, kwargs, timeout_s, creation, span, kind
                    return Encoder.request(self, *again)
            called = () if name is not None else (function,)
            return self._packed_request(
                peer, kind, flags, head, values, called, home_of, made is False
            )
        frame, requires_grad = made
        context_id, message_id = self._placed_in_graph(peer, tensors, requires_grad)
        if context_id or message_id:
            place_in_graph(frame, context_id, message_id)
        return Request(self.take_back, peer, kind, flags, frame, message_id)

    def post(self, peer: Peer, head: bytes, values: Sequence[Any]) -> Request:
        """Encodes values for a port as a request; see ``request``.

        Args:
            peer: The receiver.
            head: What the sender says of the values, at most 65,535 bytes.
            values: The values.
        """
        return Encoder.request(self, peer, head, values, {}, math.inf, kind=Kind.POST)

    def _packed_request(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        head: tuple[float, int, bytes, bytes],
        values: tuple[Any, ...],
        called: tuple[Any, ...],
        home_of: Callable[[Any], ReferenceId | None],
        needs_pickle: bool,
    ) -> Request:
        """Does the same for tensors beside the frame, pickled values, and calls to this worker.

        Args:
            peer: The receiver.
            kind: The kind of message.
            flags: Whether the values end with names.
            head: Time limit, creation, name and span of the message.
            values: The values.
            called: The function, if it goes by value.
            home_of: As for ``values.encode``.
            needs_pickle: Whether ``values.encode`` is known to leave the values to pickle.
        """
        timeout_s, creation, name, span = head
        packed = None
        if not (peer.is_self or called or needs_pickle):
            tensors: list[Tensor] = []
            payload = encode(values, tensors, peer.receiver, home_of)
            if payload is not None and all(map(is_dense, tensors)):
                packed = Packed(payload, tensors, [])
        if packed is None:
            packed = self._pack(peer, kind, flags, name, values, called, needs_pickle)
        payload, tensors, externals = packed
        moves_host = peer.device_maps.moves_host_of_calls
        inlined = None if peer.is_self else _inlined(tensors, moves_host)
        content, requires_grad = (b"", None) if inlined is None else inlined
        if inlined is None and not peer.device_maps.is_identity:
            # Not when it is sent: that may be later, once there is a connection.
            peer.device_maps.check(tensors, is_back=False)
        context_id, message_id = self._placed_in_graph(peer, tensors, requires_grad)
        handed: Sequence[HandedReference] = ()
        try:
            if externals:
                handed = self.hand_on(externals, peer)
            frame, apart = bytearray(HEADER_BYTES), None
            if not peer.is_self:
                numbers = timeout_s, creation, context_id, message_id
                frame += encode_call(*numbers, name, span, handed, payload, content)
            if inlined is None:
                value_head = context_id, message_id, (), 0, 0
                call_head = timeout_s, creation, name, span, value_head
                apart = Apart(self._tensor_messages, peer, call_head, packed)
            return Request(self.take_back, peer, kind, flags, frame, message_id, handed, apart)
        except BaseException:
            self.take_back(peer, handed, message_id)
            raise

    def _placed_in_graph(
        self, peer: Peer, tensors: Sequence[Tensor], requires_grad: bool | None
    ) -> tuple[int, int]:
        """Returns the context and the number of a call's tensors in their graph.

        Args:
            peer: The callee.
            tensors: The tensors of the call.
            requires_grad: Whether one of them requires grad; None if that is not known.
        """
        if tensors:
            self._check_count(tensors)
            if forward_ad._current_level >= 0 and not peer.is_self:
                _check_tangents(tensors)
        context_id = current_id()
        if not torch.is_grad_enabled():
            # Neither the arguments nor the result of a call under no_grad are part of a graph.
            return 0 if peer.is_self else NO_GRAD, 0
        if context_id or requires_grad is not False:
            return self.record_send(context_id, tensors, peer)
        return 0, 0

    def _check_whole(self, peer: Peer, values: tuple[Any, ...]) -> None:
        """Raises SerializationError for an argument that a transform of ``torch.func`` has made."""
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        try:
            tensors = peer.pack(values).tensors
        except SerializationError:
            return  # The same error with a better text follows.
        if any(map(is_wrapped, tensors)):
            raise SerializationError(NO_MEMORY)

    def _pack(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        name: bytes,
        values: tuple[Any, ...],
        called: tuple[Any, ...],
        needs_pickle: bool,
    ) -> Packed:
        """Packs values that are not simple, behind a function by value."""
        packed: Packed
        try:
            packed = (peer.pickle if needs_pickle else peer.pack)((*called, *values))
            return packed
        except SerializationError:
            pass  # Fails again, and names the place among the program's arguments:
        args, kwargs = split_names(values) if flags & NAMED else (values, {})
        own = _own_parameters(name) if kind is Kind.CALL else ()
        peer.pack((args[len(own) :], {**dict(zip(own, args, strict=False)), **kwargs}, *called))
        packed = peer.pack((*called, *values))
        return packed

    def pack_for(self, peers: Collection[Peer], value: object) -> Packed:
        """Packs a value once so that each of ``peers`` can read it, now or later.

        Do not keep a packed value that contains references: each is counted when it is sent.

        Args:
            peers: The receivers.
            value: Any value for ``pack``, or for ``pack_plain`` if a receiver is strict.

        Raises:
            SerializationError: A part of the value cannot be serialized.
        """
        others = [peer for peer in peers if not peer.is_self]
        by_name = all(peer.main_by_name for peer in peers)
        if any(peer.registration.is_strict for peer in others):
            return pack_plain(value, main_by_name=by_name)
        obstacle = next(filter(None, [peer.not_by_value for peer in others]), "")
        return pack(value, main_by_name=by_name, not_by_value=obstacle)

    def packed_result(
        self, peer: Peer, result: Any, needs_pickle: bool
    ) -> tuple[bytes, list[Tensor], Sequence[object], Encoded | None]:
        """Returns the parts of ``Packed``, and the tensors if they stand in the message.

        With ``needs_pickle``, ``values.encode`` is known to leave the result to pickle.
        """
        if peer.is_self:
            return (*peer.pack(result), None)
        moves_host = peer.device_maps.moves_host_of_answers
        if type(result) is Tensor and not result.__dict__ and not moves_host:
            inlined = encode_tensors((result,))  # Most results are a tensor.
            if inlined is not None or is_dense(result):
                return b"", [result], (), inlined
        packed = (peer.pickle if needs_pickle else peer.pack)(result)
        self._check_count(packed.tensors)
        return (*packed, _inlined(packed.tensors, moves_host))

    def _check_count(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) > self._tensor_limit:
            raise too_many(self._tensor_limit)

    def record_send(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer, is_answer: bool = False
    ) -> tuple[int, int]:
        """Returns a message's context id and its message id; 0 where there is none."""
        # A message to oneself carries tensors by reference, so they stay in their graph.
        if context_id == NO_GRAD or peer.is_self:
            return context_id, 0
        if context_id:
            try:
                context = self._contexts.get_or_create(context_id, peer.id)
                return context_id, context.record_send(tensors, peer.id, is_answer)
            except AutogradError:
                pass  # The call has outlived its context: send it without.
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                return 0, self._record_outside(tensors, peer, is_answer)
        return 0, 0

    def _record_outside(self, tensors: Sequence[Tensor], peer: Peer, is_answer: bool) -> int:
        if not self._arrivals.keeps_graphs:
            return 0
        outside = self._outside
        computed = [each for each in tensors if each.requires_grad and not each.is_leaf]
        message_id = outside.record_send(computed, peer.id, is_answer)
        if peer.lost is not None:  # Race: its records may have been dropped before.
            outside.take_back(message_id)
        return message_id

    def hand_on(self, externals: Sequence[object], peer: Peer) -> list[HandedReference]:
        """Counts the references in a message for ``peer``, which keep their values alive."""
        handed: list[HandedReference] = []
        try:
            for reference in externals:
                assert isinstance(reference, Handle)
                reference.check_travels()
                if not peer.is_self:
                    handed.append(self._references.hand_on(reference.id, peer))
        except BaseException:
            self.take_back(peer, handed, 0)
            raise
        return handed

    def take_back(self, peer: Peer, handed: Sequence[HandedReference], message_id: int) -> None:
        """Takes back the references and the graph of a message that could not be sent."""
        for each in handed:
            self._references.undeliverable(each, peer)
        if message_id:
            self._outside.take_back(message_id)


def _inlined(tensors: Sequence[Tensor], moves_host: bool) -> Encoded | None:
    """Returns the tensors of a message as they stand in it; None if they need tables."""
    if not tensors:
        return NO_TENSORS
    return None if moves_host else encode_tensors(tensors)


def _check_tangents(tensors: Sequence[Tensor]) -> None:
    """Raises SerializationError for a tensor of forward-mode differentiation."""
    unpack_dual: Any = forward_ad.unpack_dual
    for tensor in tensors:
        if unpack_dual(tensor).tangent is not None:
            raise SerializationError(
                "a tensor has a tangent, of torch.autograd.forward_ad, which would be lost in a "
                "call: make the dual tensor in the remote function, and return the tangent as well"
            )


def _own_parameters(name: bytes) -> tuple[str, ...]:
    """Returns the parameters of a function of Weft that precede the program's arguments."""
    if not name.startswith(_OWN):
        return ()
    code: CodeType | None = getattr(resolve(name), "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARARGS:
        return ()
    return code.co_varnames[: code.co_posonlyargcount]


# Decoding

_log = logging.getLogger("torchweft")
_is_in_inference_mode = torch.is_inference_mode_enabled
_InferenceMode: Any = getattr(torch._C, "_InferenceMode")  # noqa: B009 (its stub lacks it)


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
        self._is_native = native is not None and not reader.is_strict

    def natively(self) -> tuple[Any, ...]:
        """Returns what the native twin takes to decode values here; empty if it may not."""
        if (
            not self._is_native
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
        if self._is_native and not (flags or is_own):
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
