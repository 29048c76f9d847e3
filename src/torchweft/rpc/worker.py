"""Encodes one worker's calls and results as messages, and decodes received messages."""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft import knobs
from torchweft.agent.agent import SERVED_STREAMS, Agent, Slot
from torchweft.agent.calls import PendingCall
from torchweft.agent.code_keeping import CodeKeeper
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import (
    LocalMessage,
    TensorMessage,
    TensorMessages,
    local_frame,
)
from torchweft.autograd.contexts import Context, Contexts, current_id
from torchweft.autograd.engine import Engine
from torchweft.autograd.outside import NO_GRAD, Arrivals
from torchweft.errors import (
    AutogradError,
    NotInitialized,
    ProtocolError,
    ReferenceGone,
    SerializationError,
)
from torchweft.ids import ReferenceId
from torchweft.protocol.calls import SlowFunctions
from torchweft.protocol.connecting import Outgoing
from torchweft.protocol.kept_code import SentCode
from torchweft.protocol.membership.registration import why_not_by_value
from torchweft.rpc.by_value import pack_function
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.handles import Handle
from torchweft.rpc.requests import Request, TableRequest, names_of, own_copy, reply_by_tables
from torchweft.rpc.unseen import UnseenErrors
from torchweft.runtime import device_streams
from torchweft.runtime.reports import log_exception
from torchweft.serialize import inline
from torchweft.serialize.by_value import Code
from torchweft.serialize.exceptions import pack_error, unpack_error
from torchweft.serialize.functions import name_of
from torchweft.serialize.inline import NO_TENSORS, EncodedValue, Inlined
from torchweft.serialize.objects import Packed, pack, pack_plain, unpack
from torchweft.serialize.reading import TRUSTING, Reader
from torchweft.serialize.reducers import is_dense
from torchweft.serialize.table import COMPUTED, PARAMETER, REQUIRES_GRAD, SHARED
from torchweft.serialize.tensors import too_many
from torchweft.serialize.values import ATOMS, PICKLE, decode, encode_atom, encode_simple, no_home
from torchweft.wire.frames import Buffer, Frame
from torchweft.wire.messages import (
    ERROR_REPLY,
    NO_CREATION,
    POSITIONAL,
    TABLES,
    HandedReference,
    Kind,
    ValueHead,
    decode_reply,
    encode_call,
    encode_reply,
    encode_row_reply,
    with_code,
)

_log = logging.getLogger("torchweft")

Around = Callable[[Any, Callable[[], Any]], Any]
"""Calls a function for a served call, and returns its result."""


class Batches(NamedTuple):
    """Runs the functions of batches of calls, while calls carry spans.

    Attributes:
        run: Called with the calls of a batch, its function, and what runs that; returns the result.
        context_here: Returns the context of the span of this thread, for a call that it makes.
    """

    run: Callable[[Sequence[Any], Any, Callable[[], Any]], Any]
    context_here: Callable[[], object]


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
        # Looked up once: every message needs them.
        self._unpack, self._resolve_value = reader.unpack, reader.resolve_value
        self._take_home = self._come_home
        self.tensor_messages = TensorMessages(agent)
        self.references = ReferenceKeeper(agent)
        self.engine = Engine(agent, self.tensor_messages, reader)
        self.contexts: Contexts = self.engine.contexts
        self.arrivals = Arrivals(self.engine.outside, warns_of_lost_gradients)
        self.coroutines = CoroutineRunner(
            f"weft-{agent.info.name}-asyncio", agent.slots[SERVED_STREAMS]
        )
        self.unfinished: set[object] = set()
        """Served calls that make values; a coroutine's call holds no thread while it runs."""
        self._home_of: dict[int, Callable[[Any], ReferenceId | None]] = {}
        self._packers: dict[int, Callable[..., Packed]] = {}
        self._obstacles: dict[int, str] = {}
        self.codes = CodeKeeper(agent, is_strict=reader.is_strict)
        agent.members.on_joined(self._learn_to_encode)
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self.slow = SlowFunctions()
        self.gathering: dict[Any, Any] = {}
        """A ``Gathering`` for each batched function that other workers have called: by its name, or
        by the reference and the name of a method."""
        self.has_left = False
        """Whether this process has left its group, though it may still serve for a moment."""
        self.as_raised_here: Callable[[BaseException], BaseException] = lambda error: error
        """Returns the error to raise in the program in place of another worker's error."""
        self.unseen = UnseenErrors(agent, self.references, reader.unpack_error, self.pack_error)
        self.call_type: type[PendingCall] = PendingCall
        """The type of calls that wait for an answer; another one while they are watched."""
        self.note_creation: Callable[[Any, ReferenceId], None] | None = None
        """Called for each call that makes a value, while calls are watched."""
        self.around: Around | None = None
        """Runs parts of a served call that run apart from its begin, while calls carry spans."""
        self.batches: Batches | None = None
        """Runs the functions of batches, while calls carry spans."""
        self.on_failure: Callable[[Peer, BaseException], None] | None = None
        """Called with the caller and the error of every call that failed here."""
        agent.receiver.discard = self.discard_reply

    def _learn_to_encode(self, peer: Peer) -> None:
        by_name = peer.main_by_name
        if peer.registration.is_strict and not peer.is_self:
            self._packers[peer.id] = partial(pack_plain, main_by_name=by_name)
        else:
            obstacle = why_not_by_value(self.agent.me.registration, peer.registration)
            self._obstacles[peer.id] = obstacle
            peer.keeps_code = not (obstacle or peer.is_self)
            self._packers[peer.id] = partial(pack, main_by_name=by_name, not_by_value=obstacle)

        def home_of(value: Any) -> ReferenceId | None:
            if not isinstance(value, Handle) or value.id.owner != peer.id:
                return None
            value.check_travels()
            return value.id

        self._home_of[peer.id] = home_of

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
    ) -> Request:
        """Encodes a call as a request; values that it hands on are kept alive from now on.

        Args:
            peer: The callee.
            function: The callable, or its name.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout_s: The caller's time limit, in seconds, as the callee is told it.
            creation: Number of the reference that the result is for.

        Raises:
            SerializationError: The callable or an argument cannot be serialized, or a tensor is on
                a device without an entry in the device map.
        """
        name = function if isinstance(function, bytes) else name_of(function, peer.main_by_name)
        tensors: list[Tensor] = []
        externals: Sequence[object] = ()
        inlined: Inlined | None = NO_TENSORS
        entries: Sequence[SentCode] = ()
        flags = POSITIONAL
        payload: bytes | None = None
        if name is not None and not kwargs and not peer.is_self:
            # No caller waits for a remote() call or keeps its references: hand them on.
            home_of = self._home_of[peer.id] if creation == NO_CREATION else no_home
            payload = encode_simple(args, tensors, peer.main_by_name, home_of)
            if tensors and payload is not None:
                inlined = None if peer.device_maps.moves_host_of_calls else inline.encode(tensors)
                if inlined is None and not all(map(is_dense, tensors)):
                    payload = None
        if payload is None:
            (payload, tensors, externals), flags, entries = self._pack_arguments(
                peer, name, args, kwargs, function, creation
            )
            inlined = inline.encode(tensors) if tensors else NO_TENSORS
            if peer.is_self or (tensors and peer.device_maps.moves_host_of_calls):
                inlined = None
        if len(tensors) > self._tensor_limit:
            raise too_many(len(tensors), self._tensor_limit)
        if inlined is None and not peer.device_maps.is_identity:
            # Not when it is sent: that may be later, once there is a connection.
            peer.device_maps.check(tensors, is_back=False)
        context_id, message_id = current_id(), 0
        if not torch.is_grad_enabled():
            # Neither the arguments nor the result of a call under no_grad are part of a graph.
            context_id = 0 if peer.is_self else self.arrivals.no_grad_id
        elif context_id or inlined is None or inlined[1]:
            context_id, message_id = self._record_send(context_id, tensors, peer)
        handed = self._hand_on(externals, peer) if externals else ()
        if inlined is None:
            head = (timeout_s, creation, context_id, message_id, name or b"")
            packed = Packed(payload, tensors, list(externals))
            parts = self.tensor_messages
            return TableRequest(self._take_back, peer, handed, parts, flags, head, packed, entries)
        frame = encode_call(
            flags,
            timeout_s,
            creation,
            context_id,
            message_id,
            name or b"",
            handed,
            payload,
            inlined[0],
        )
        if not entries:
            return Request(self._take_back, peer, handed, message_id, frame)
        frame = with_code(frame, names_of(entries))
        request = Request(self._take_back, peer, handed, message_id, frame)
        request.entries = entries
        return request

    def _pack_arguments(
        self,
        peer: Peer,
        name: bytes | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        function: Any,
        creation: int,
    ) -> tuple[Packed, int, Sequence[SentCode]]:
        """Returns arguments that are not simple, the flags of the call, and the code it names."""
        packer = self._packers[peer.id]
        if name is None and peer.keeps_code:
            home_of = self._home_of[peer.id] if creation == NO_CREATION else no_home
            return pack_function(self.codes, peer, packer, function, args, kwargs, home_of)
        # A message without the name of a function is for a port, and names no code.
        codes: list[Code] | None = [] if name and peer.keeps_code else None
        content: Sequence[Any] = (args, kwargs, function)
        flags = 0
        if name is not None:
            content, flags = ((args, kwargs), 0) if kwargs else (args, POSITIONAL)
        packed = None
        try:
            packed = packer(content, codes=codes)
        except SerializationError:
            if flags != POSITIONAL:
                raise
        if packed is None:  # Fails again, and names the place among the arguments.
            return packer((args, {})), 0, ()
        entries = self.codes.lend(peer, codes) if codes else ()
        return (packer(content), flags, ()) if entries is None else (packed, flags, entries)

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
        obstacle = next(filter(None, [self._obstacles[peer.id] for peer in others]), "")
        return pack(value, main_by_name=by_name, not_by_value=obstacle)

    def pack_result_for(self, peers: Collection[Peer], value: object) -> Packed:
        """Does the same in the form in which results of calls are packed."""
        if type(value) is tuple:
            tensors: list[Tensor] = []
            payload = encode_simple(value, tensors, all(peer.main_by_name for peer in peers))
            if payload is not None:
                return Packed(payload, tensors, [])
        return self.pack_for(peers, value)

    def _record_send(
        self, context_id: int, tensors: Sequence[Tensor], peer: Peer, is_answer: bool = False
    ) -> tuple[int, int]:
        """Returns a message's context id and its message id; 0 where there is none."""
        # A message to oneself carries tensors by reference, so they stay in their graph.
        if context_id == NO_GRAD or peer.is_self:
            return context_id, 0
        if context_id:
            try:
                context = self.contexts.get_or_create(context_id)
                return context_id, context.record_send(tensors, peer.id, is_answer)
            except AutogradError:
                pass  # The call has outlived its context: send it without.
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                return 0, self._record_outside(tensors, peer, is_answer)
        return 0, 0

    def _record_outside(self, tensors: Sequence[Tensor], peer: Peer, is_answer: bool) -> int:
        if not self.arrivals.keeps_graphs:
            return 0
        outside = self.engine.outside
        computed = [each for each in tensors if each.requires_grad and not each.is_leaf]
        message_id = outside.record_send(computed, peer.id, is_answer)
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

    def open(
        self,
        peer: Peer,
        control: Buffer,
        head: ValueHead,
        message: TensorMessage | None,
        is_answer: bool = False,
        codes: Sequence[Code] = (),
    ) -> Any:
        """Returns the value in a message of another worker, with references and tensors in place.

        Args:
            peer: The sender.
            control: The message.
            head: Its head.
            message: Its tensors, all fetched, if they came by tables.
            is_answer: Whether it is the result of a call.
            codes: The code that it names.
        """
        context_id, message_id, references, start, end = head
        externals: Sequence[object] = ()
        if references:
            externals = [self._receive(handed, peer) for handed in references]
        context = self._context_of(context_id, peer) if context_id else None
        tensors: Sequence[Tensor] = ()
        if message is not None:
            tensors = self._receive_tensors(peer, message, context, head, is_answer)
        elif end < len(control):
            try:
                received, flags = inline.decode(control, end)
                if len(received) > self._tensor_limit:
                    raise too_many(len(received), self._tensor_limit, self.agent.info.name)
            except BaseException:
                self.give_back(peer, context_id, message_id)
                raise
            tensors = received
            if flags:
                tensors = self._place_inlined(peer, received, flags, context, head, is_answer)
        if start == end:  # As ``unpack`` does; most results are one tensor or None.
            return tensors[0] if tensors else None
        payload = control[start:end]
        if payload[0] == PICKLE:
            return self._unpack(payload, tensors, externals, codes=codes)
        return decode(payload, tensors, externals, self._resolve_value, self._take_home)

    def open_own(self, message: LocalMessage, context_id: int, is_answer: bool = False) -> Any:
        """Returns the value in a message of this worker to itself; see ``open``."""
        tensors = message.tensors
        device_streams.use(message.mark, tensors)
        if self.agent.me.device_maps.is_any:
            tensors = self._place_own(tensors, context_id, is_answer)
        elif self.copies_own:
            keeps = self.arrivals.keeps_graphs
            tensors = [own_copy(each, context_id, keeps) for each in tensors]
        return unpack(message.payload, tensors, message.externals)

    def _place_own(
        self, tensors: Sequence[Tensor], context_id: int, is_answer: bool
    ) -> list[Tensor]:
        """Returns tensors of a message to this worker itself on the devices of its own map."""
        maps, keeps = self.agent.me.device_maps, self.arrivals.keeps_graphs
        place = maps.back if is_answer else maps.forward
        placed = []
        for tensor in tensors:
            device = place(tensor.device)
            if self.copies_own or device != tensor.device:
                tensor = own_copy(tensor, context_id, keeps, device)
            placed.append(tensor)
        return placed

    def _come_home(self, reference: ReferenceId) -> Handle:
        """Returns a reference to a value of this worker that the sender has kept meanwhile."""
        if not self.references.came_home(reference):
            raise _reference_gone(reference)
        return self.reference_type.from_received(self.references, reference)

    def _receive(self, handed: HandedReference, sender: Peer) -> Handle:
        if not self.references.received(handed, sender):
            raise _reference_gone(handed.reference)
        return self.reference_type.from_received(self.references, handed.reference)

    def _receive_tensors(
        self,
        peer: Peer,
        message: TensorMessage,
        context: Context | None,
        head: ValueHead,
        is_answer: bool,
    ) -> list[Tensor]:
        context_id, message_id, *_ = head
        if context is not None and message_id:
            tensors = message.tensors(detached=True)
            flags = message.flags()
            return context.record_receive(message_id, peer.id, tensors, flags, is_answer)
        try:
            tensors = message.tensors(detached=False)
            if message.some_are_computed:
                self._place_computed(peer, tensors, message.flags(), head, is_answer)
            return tensors
        except BaseException:
            self.give_back(peer, context_id, message_id)
            raise

    def _place_inlined(
        self,
        peer: Peer,
        tensors: list[Tensor],
        flags: list[int],
        context: Context | None,
        head: ValueHead,
        is_answer: bool,
    ) -> list[Tensor]:
        """Does the same for tensors that stand in the message."""
        message_id = head[1]
        if context is not None and message_id:
            return context.record_receive(message_id, peer.id, tensors, flags, is_answer)
        for place, flag in enumerate(flags):
            if flag & PARAMETER:
                tensors[place] = Parameter(tensors[place], bool(flag & REQUIRES_GRAD))
            elif flag & REQUIRES_GRAD:
                tensors[place].requires_grad_()
        self._place_computed(peer, tensors, flags, head, is_answer)
        return tensors

    def _place_computed(
        self,
        peer: Peer,
        tensors: list[Tensor],
        flags: list[int],
        head: ValueHead,
        is_answer: bool,
    ) -> None:
        """Marks tensors with a graph at the sender, in a message outside of contexts."""
        computed = [place for place, flag in enumerate(flags) if flag & COMPUTED]
        for place in computed:
            if flags[place] & SHARED:  # As in a context: separate graphs need separate memory.
                tensors[place] = tensors[place].detach().clone()
        if computed:
            context_id, message_id, *_ = head
            self.arrivals.place(
                tensors, computed, peer.name, peer.id, context_id, message_id, is_answer
            )

    def refuse(self, peer: Peer, head: ValueHead) -> None:
        """Releases the references and the graph that an unread message holds at its sender."""
        context_id, message_id, references, *_ = head
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
        handed: Sequence[HandedReference] = ()
        message_id = 0
        try:
            payload, tensors, externals, inlined = self._packed_result(peer, result)
            if context_id or inlined is None or inlined[1]:
                context_id, message_id = self._record_send(context_id, tensors, peer, True)
            if externals:
                handed = self._hand_on(externals, peer)
            if inlined is not None:
                answer = encode_reply(
                    number, 0, context_id, message_id, handed, payload, inlined[0]
                )
            else:
                packed = Packed(payload, tensors, list(externals))
                message = reply_by_tables(
                    self.tensor_messages, peer, number, context_id, message_id, packed, handed
                )
        except BaseException as error:  # The result's own code may even exit.
            self._take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)
            return
        try:
            if inlined is not None:
                self.agent.answers.send(peer, answer)
            else:
                self.agent.sender.send(peer, message)
        except (ConnectionError, NotInitialized):
            self._take_back(peer, handed, message_id)
            _log.debug("the result of call %d goes nowhere: one of the two has left", number)
        except BaseException as error:
            self._take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)

    def answer_rows(self, rows: Sequence[tuple[Any, EncodedValue]]) -> None:
        """Ends calls of other workers, each with its part of one result, in one loop.

        Must be called in a block of ``Answers.together``.

        Args:
            rows: Served calls whose callers wait for an answer, and the answers.
        """
        answers: dict[Peer, tuple[list[Any], list[Buffer]]] = {}
        for call, row in rows:
            peer, context_id = call.peer, call.context_id
            if (
                (context_id and context_id != NO_GRAD)
                or peer.device_maps.moves_host_of_answers
                or call.was_cancelled
                or call.has_ended
            ):
                call(row, None)
                continue
            found = answers.get(peer)
            if found is None:
                found = answers[peer] = ([], [])
            found[0].append(call)
            found[1].append(encode_row_reply(call.number, context_id, *row))
        for peer, (calls, frames) in answers.items():
            self._send_rows(peer, calls, frames)

    def _send_rows(self, peer: Peer, calls: list[Any], frames: list[Buffer]) -> None:
        """Sends the answers to calls of one worker, which end with that."""
        try:
            self.agent.answers.send_all(peer, frames)
        except (ConnectionError, NotInitialized):
            _log.debug("%d results go nowhere: one of the two has left", len(frames))
        except BaseException as error:
            for call in calls:
                self.reply_error(peer, call.number, error)
        for call in calls:
            call.end()

    def _packed_result(
        self, peer: Peer, result: Any
    ) -> tuple[bytes, list[Tensor], Sequence[object], Inlined | None]:
        """Returns the parts of ``Packed``, and the tensors if they stand in the message."""
        kind = type(result)
        if peer.is_self:
            return (*self._packers[peer.id](result), None)
        if peer.device_maps.moves_host_of_answers:
            return self._packed_for_tables(peer, result)
        if kind is Tensor and not result.__dict__:
            # Most results are a tensor, None, or a tuple of tensors and numbers.
            inlined = inline.encode((result,))
            if inlined is not None or is_dense(result):
                return b"", [result], (), inlined
        elif result is None:
            return b"", [], (), NO_TENSORS
        elif kind is EncodedValue:
            return result.payload, [], (), (result.content, False)
        elif kind in ATOMS:
            payload = encode_atom(result)
            if payload is not None:
                return payload, [], (), NO_TENSORS
        elif kind is tuple:
            tensors: list[Tensor] = []
            payload = encode_simple(result, tensors, peer.main_by_name)
            if payload is not None:
                self._check_count(tensors)
                inlined = inline.encode(tensors) if tensors else NO_TENSORS
                if inlined is not None or all(map(is_dense, tensors)):
                    return payload, tensors, (), inlined
        packed = self._packers[peer.id](result)
        self._check_count(packed.tensors)
        return (*packed, inline.encode(packed.tensors) if packed.tensors else NO_TENSORS)

    def _packed_for_tables(
        self, peer: Peer, result: Any
    ) -> tuple[bytes, list[Tensor], Sequence[object], Inlined | None]:
        """Does the same for a worker where tensors on the CPU arrive on another device."""
        if type(result) is EncodedValue:
            tensors, _ = inline.decode(result.content, 0)
            result = unpack(result.payload, tensors, ())
        packed = self._packers[peer.id](result)
        self._check_count(packed.tensors)
        return (*packed, None if packed.tensors else NO_TENSORS)

    def _check_count(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) > self._tensor_limit:
            raise too_many(len(tensors), self._tensor_limit)

    def _take_back(self, peer: Peer, handed: Sequence[HandedReference], message_id: int) -> None:
        for each in handed:
            self.references.undeliverable(each, peer)
        if message_id:
            self.engine.outside.take_back(message_id)

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
            message = [encode_reply(number, ERROR_REPLY, 0, 0, (), payload)]
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
        flags = frame.flags
        control: Any = frame.control
        if type(control) is LocalMessage:
            if flags & ERROR_REPLY:
                raise self.as_raised_here(unpack_error(control.payload))
            return self.open_own(control, control.head[0], is_answer=True)
        head = decode_reply(control)
        message = None
        if flags:
            if flags & ERROR_REPLY:
                payload = control[head[3] : head[4]]
                raise self.as_raised_here(self.reader.unpack_error(bytes(payload)))
            message = self.tensor_messages.read(frame)
            self.tensor_messages.fetch(peer, message)
        return self.open(peer, control, head, message, is_answer=True)

    def discard_reply(self, peer: Peer, frame: Frame) -> None:
        """Discards a late reply, and releases what it holds at its sender."""
        if not frame.control or isinstance(frame.control, LocalMessage):
            return  # Retransmitted tensors, for a call that was given up; or a message to itself.
        try:
            if frame.flags & TABLES:
                self.tensor_messages.discard(peer, self.tensor_messages.read(frame))
            self.refuse(peer, decode_reply(frame.control))
        except ProtocolError:
            _log.debug("a late reply of worker %r cannot be read", peer.name)


def _reference_gone(reference: ReferenceId) -> ReferenceGone:
    return ReferenceGone(f"{reference} arrived after this worker had dropped its references")


WORKER: Slot[Worker] = Slot()


def current_worker() -> Worker:
    """Returns the worker of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current().slots[WORKER]
