"""Calls and results as messages, and copies for calls of a worker to itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import LocalMessage, TensorMessages, local_frame
from torchweft.autograd.outside import OutsideRecords
from torchweft.protocol.connecting import Outgoing
from torchweft.serialize.inline import Inlined
from torchweft.serialize.objects import Packed
from torchweft.wire.messages import (
    CallHead,
    HandedReference,
    Kind,
    ReplyHead,
    encode_call,
    encode_call_front,
    encode_reply,
    encode_reply_front,
)


class Request:
    """A call as a message, and the references and the graph that it holds until it arrives.

    Args:
        tensor_messages: Encodes tensors that do not stand in the message.
        references: Counts the references that the message hands on.
        outside: Records the graph of a message outside of contexts.
        peer: The callee.
        flags: Flags of the frame.
        head: Time limit, creation, context, message and function, as ``CallHead`` has them.
        packed: The value of the message.
        inlined: Its tensors, if they stand in the message; otherwise None.
        handed: The references inside the value, in order.
    """

    __slots__ = (
        "_flags",
        "_handed",
        "_head",
        "_inlined",
        "_outside",
        "_packed",
        "_peer",
        "_references",
        "_tensor_messages",
    )

    def __init__(
        self,
        tensor_messages: TensorMessages,
        references: ReferenceKeeper,
        outside: OutsideRecords,
        peer: Peer,
        flags: int,
        head: tuple[float, int, int, int, bytes],
        packed: Packed,
        inlined: Inlined | None,
        handed: Sequence[HandedReference],
    ) -> None:
        self._tensor_messages = tensor_messages
        self._references = references
        self._outside = outside
        self._peer = peer
        self._flags = flags
        self._head = head
        self._packed = packed
        self._inlined = inlined
        self._handed = handed

    @property
    def function(self) -> bytes:
        """The name of the function, empty if it is inside the value."""
        return self._head[4]

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call."""
        packed = self._packed
        if self._inlined is not None:
            parts, size, _ = self._inlined
            return [
                encode_call(
                    number, self._flags, *self._head, self._handed, packed.payload, parts, size
                )
            ]
        if self._peer.is_self:
            head = CallHead(*self._head, (), 0, 0)
            local = LocalMessage(head, packed.payload, packed.tensors, packed.externals)
            return local_frame(Kind.CALL, self._flags, number, local)
        front = encode_call_front(*self._head, self._handed, packed.payload)
        return self._tensor_messages.encode(
            self._peer, Kind.CALL, self._flags, number, front, packed.tensors
        )

    def take_back(self) -> None:
        """Takes back the references and the graph of a message that could not be sent."""
        for handed in self._handed:
            self._references.undeliverable(handed, self._peer)
        message_id = self._head[3]
        if message_id:
            self._outside.take_back(message_id)


def reply_message(
    tensor_messages: TensorMessages,
    peer: Peer,
    number: int,
    flags: int,
    context_id: int,
    message_id: int,
    packed: Packed,
    inlined: Inlined | None,
    handed: Sequence[HandedReference] = (),
) -> Outgoing:
    """Returns the answer to a call; see ``Request`` for the arguments."""
    if peer.is_self:
        head = ReplyHead(context_id, message_id, (), 0, 0)
        local = LocalMessage(head, packed.payload, packed.tensors, packed.externals)
        return local_frame(Kind.REPLY, flags, number, local)
    if inlined is not None:
        parts, size, _ = inlined
        return [
            encode_reply(number, flags, context_id, message_id, handed, packed.payload, parts, size)
        ]
    front = encode_reply_front(context_id, message_id, handed, packed.payload)
    return tensor_messages.encode(peer, Kind.REPLY, flags, number, front, packed.tensors)


# Calls of a worker to itself.


def own_copy(tensor: Tensor, context_id: int, keeps_graphs: bool = False) -> Tensor:
    """Returns a copy of a tensor that a worker sends to itself, as if another had received it.

    In an autograd context (not 0) the copy stays in the graph. Outside of contexts, the copy of a
    leaf is a new leaf, and that of a computed tensor stays in the graph if ``keeps_graphs``.
    """
    if tensor.requires_grad and (context_id or (keeps_graphs and not tensor.is_leaf)):
        with torch.enable_grad():
            copy = tensor.clone()
        if isinstance(tensor, Parameter):
            copy._is_param = True  # for isinstance
        return copy
    copy = tensor.detach().clone()
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
