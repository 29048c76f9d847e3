"""Converts messages of a backward pass to frames, and frames to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchweft.autograd import codec
from torchweft.autograd.codec import PassName
from torchweft.autograd.contexts import Contexts
from torchweft.autograd.gradients import Gradient
from torchweft.autograd.outside import OutsideRecords
from torchweft.protocol.backward import Failed, Gradients, Message
from torchweft.serialize import inline
from torchweft.serialize.exceptions import pack_error
from torchweft.serialize.objects import pack, pack_plain
from torchweft.serialize.reading import Reader
from torchweft.serialize.values import encode
from torchweft.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
)
from torchweft.wire.frames import Buffer, Frame, encode_frame
from torchweft.wire.messages import TABLES, Kind
from torchweft.worker.agent import Agent
from torchweft.worker.peers import Peer
from torchweft.worker.tensor_messages import TensorMessages

_SMALL_NUMEL = 1024
_ONLY_TENSORS = frozenset({Tensor})


class Envelopes:
    """Makes and opens the frames of backward passes, for one worker.

    In a pass that is itself recorded, gradients have a graph. They are recorded like any other
    message of the context.

    Args:
        agent: The worker's agent.
        tensor_messages: Carries gradients that are too large to stand in their message.
        contexts: The worker's contexts.
        outside: The worker's records outside of contexts.
        reader: Reads the errors of other workers.
    """

    def __init__(
        self,
        agent: Agent,
        tensor_messages: TensorMessages,
        contexts: Contexts,
        outside: OutsideRecords,
        reader: Reader,
    ) -> None:
        self._contexts = contexts
        self._outside = outside
        self._worker_name = agent.info.name
        self._tensor_messages = tensor_messages
        self._reader = reader

    def encode(self, peer: Peer, name: PassName, messages: Sequence[Message]) -> list[Buffer]:
        """Returns the bytes to write for messages to another worker."""
        if has_dispatch_modes() or has_function_modes():
            with plain_operations():
                return self.encode(peer, name, messages)
        buffers: list[Buffer] = []
        for message in messages:
            if isinstance(message, Gradients):
                buffers += self._seal_gradients(peer, name, message)
                continue
            if isinstance(message, Failed) and isinstance(message.error, BaseException):
                is_strict = peer.registration.is_strict
                message.error = pack_error(message.error, self._worker_name, is_plain=is_strict)
            control = codec.encode(name, message)
            buffers += encode_frame(Kind.BACKWARD, name.mode.flags, name.pass_id, control)
        return buffers

    def _seal_gradients(self, peer: Peer, name: PassName, message: Gradients) -> list[Buffer]:
        flags = name.mode.flags
        gradients = [_plain(gradient) for gradient in message.gradients]
        payload: bytes | None = b""
        tensors: list[Any] = gradients
        if not _ONLY_TENSORS.issuperset(map(type, gradients)) or any(map(vars, gradients)):
            tensors = []
            payload = encode(tuple(gradients), tensors, main_by_name=True)
        maps = peer.device_maps
        is_back = maps.is_any and self._goes_back(name, message.message_id)
        inlined = None if payload is None else inline.encode(tensors)
        if inlined is None:
            is_strict = peer.registration.is_strict
            packed = (pack_plain if is_strict else pack)(gradients, main_by_name=True)
            payload, tensors = packed.payload, packed.tensors
            inlined = inline.encode(tensors)
        assert payload is not None
        recorded_id = self._record(name, tensors, peer, is_back) if name.mode.create_graph else 0
        front = codec.encode_head(name, message, recorded_id, len(payload)) + payload
        if inlined is None or (maps.is_any and tensors and maps.moves_host(is_back)):
            place = maps.back if is_back else maps.forward
            return self._tensor_messages.encode(
                peer,
                Kind.GRADIENTS,
                flags,
                name.pass_id,
                front,
                tensors,
                None if maps.is_identity else place,
            )
        return encode_frame(Kind.GRADIENTS, flags, name.pass_id, front + inlined[0])

    def _goes_back(self, name: PassName, message_id: int) -> bool:
        """Returns whether gradients of a received message are placed as tensors of an answer."""
        context = self._contexts.find(name.context_id)
        receive = None if context is None else context.receive(message_id)
        was_back = self._outside.is_back(message_id) if receive is None else receive.is_back
        return not was_back

    def _was_back(self, name: PassName, message_id: int) -> bool:
        """Returns whether tensors that this worker sent were placed as those of an answer."""
        context = self._contexts.find(name.context_id)
        send = None if context is None else context.send(message_id)
        send = send or self._outside.send(message_id)
        return send is not None and send.is_back

    def _record(self, name: PassName, tensors: Sequence[Tensor], peer: Peer, is_back: bool) -> int:
        context = self._contexts.get_or_create(name.context_id, peer.id)
        return context.record_send(tensors, peer.id, is_back)

    def open(self, peer: Peer, frame: Frame) -> tuple[PassName, Message]:
        """Returns the pass and message of a frame. May block to fetch large gradients.

        Raises:
            ProtocolError: It is malformed.
            WorkerLost: The sender was lost before its gradients could be fetched.
        """
        flags, control = frame.flags, frame.control
        if frame.kind == Kind.BACKWARD:
            return codec.decode(frame.id, flags, control)
        name, message, recorded_id, start, end = codec.decode_head(frame.id, flags, control)
        if flags & TABLES:
            carried = self._tensor_messages.read(frame)
            self._tensor_messages.fetch(peer, carried)
            tensors, tensor_flags = carried.tensors(detached=True), bytes(carried.flags())
        else:
            tensors, tensor_flags = inline.decode(control, end)
        if recorded_id and tensor_flags:
            context = self._contexts.get_or_create(name.context_id, peer.id)
            is_back = not self._was_back(name, message.message_id)
            tensors = context.record_receive(
                recorded_id, peer.id, tensors, tensor_flags, is_back=is_back
            )
        message.gradients = tensors
        if start < end:
            gradients = self._reader.unpack(control[start:end], tensors, ())
            message.gradients = cast(list[Gradient], gradients)
        return name, message

    def error_of(self, content: bytes) -> BaseException:
        """Returns the error that a ``Failed`` message carries."""
        return self._reader.unpack_error(content)

    def discard(self, peer: Peer, frame: Frame) -> None:
        """Tells the sender of unneeded gradients to release them."""
        if frame.kind == Kind.GRADIENTS and frame.flags & TABLES:
            self._tensor_messages.discard(peer, self._tensor_messages.read(frame))


def _plain(gradient: Gradient) -> Gradient:
    """Returns a small gradient as contiguous; the gradient of a sum is one expanded number."""
    if not isinstance(gradient, Tensor) or gradient.layout is not torch.strided:
        return gradient
    # For a contiguous tensor this returns the tensor itself.
    return gradient.contiguous() if gradient.numel() <= _SMALL_NUMEL else gradient
