"""Calls and results as messages, and copies for calls of a worker to itself."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.agent.peers import Peer
from torchweft.agent.tensor_messages import LocalMessage, TensorMessages, local_frame
from torchweft.protocol.connecting import Outgoing
from torchweft.protocol.kept_code import SentCode
from torchweft.runtime import device_streams
from torchweft.runtime.device_streams import Mark
from torchweft.runtime.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
    transform_level,
)
from torchweft.serialize.objects import Packed
from torchweft.wire.messages import (
    NUMBER,
    NUMBER_OFFSET,
    HandedReference,
    Kind,
    code_names,
    encode_call_front,
    encode_reply_front,
)

_POST = int(Kind.POST)

TakeBack = Callable[[Peer, Sequence[HandedReference], int], None]
"""Takes back the references and the graph of a message to a worker that could not be sent."""


class Request:
    """A call as a message whose tensors stand in it.

    Args:
        take_back: Called if the message cannot be sent.
        peer: The callee.
        handed: The references that the message hands on.
        message_id: The record of its tensors, or 0.
        frame: The message as ``encode_call`` returned it.
    """

    __slots__ = ("_frame", "_handed", "_message_id", "_peer", "_take_back", "entries")

    entries: Sequence[SentCode]
    """The code that the message names; the peer keeps it as long as this request exists."""

    def __init__(
        self,
        take_back: TakeBack,
        peer: Peer,
        handed: Sequence[HandedReference],
        message_id: int,
        frame: bytearray,
    ) -> None:
        self._take_back = take_back
        self._peer = peer
        self._handed = handed
        self._message_id = message_id
        self._frame = frame

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call."""
        NUMBER.pack_into(self._frame, NUMBER_OFFSET, number)
        return [self._frame]

    def post(self, port: int) -> Outgoing:
        """Returns the values alone, for a port of the receiver."""
        self._frame[0] = _POST
        return self.message(port)

    def take_back(self, *, keeps_graph: bool = False) -> None:
        """Takes back the references and the graph of a message that could not be sent.

        Args:
            keeps_graph: Whether the graph is kept, as the receiver may have the message.
        """
        self._take_back(self._peer, self._handed, 0 if keeps_graph else self._message_id)


class TableRequest(Request):
    """A call whose tensors are described by tables, or that a worker makes to itself.

    Args:
        tensor_messages: Encodes the tensors.
        flags: Flags of the frame.
        head: Time limit, creation, context, message and function; see ``CallHead``.
        packed: The value of the message.
        entries: The code that it names.
    """

    __slots__ = ("_flags", "_head", "_maker", "_mark", "_packed", "_tensor_messages")

    def __init__(
        self,
        take_back: TakeBack,
        peer: Peer,
        handed: Sequence[HandedReference],
        tensor_messages: TensorMessages,
        flags: int,
        head: tuple[float, int, int, int, bytes],
        packed: Packed,
        entries: Sequence[SentCode] = (),
    ) -> None:
        super().__init__(take_back, peer, handed, head[3], bytearray())
        self._tensor_messages = tensor_messages
        self._flags = flags
        self._head = head
        self._packed = packed
        self.entries = entries
        self._maker = 0
        self._mark = None
        if device_streams.HAS_CUDA and (peer.link is None or peer.unsent):
            # It is encoded in another thread at the first contact, or not at all, as for oneself.
            self._maker = get_ident()
            self._mark = mark_of(packed.tensors)

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call."""
        return self._encode(Kind.CALL, number)

    def post(self, port: int) -> Outgoing:
        """Returns the values alone, for a port of the receiver."""
        return self._encode(Kind.POST, port)

    def _encode(self, kind: Kind, number: int) -> Outgoing:
        if has_dispatch_modes() or has_function_modes() or transform_level():
            with plain_operations():
                return self._encode(kind, number)
        packed, flags = self._packed, self._flags
        maps = self._peer.device_maps
        if self._mark is not None and self._maker != get_ident():
            device_streams.use(self._mark, packed.tensors)
        if self._peer.is_self:
            remaining_s, creation, context_id, message_id, function = self._head
            value = (context_id, message_id, (), 0, 0)
            call_head = remaining_s, creation, function, value
            local = LocalMessage(call_head, *packed, self._mark)
            return local_frame(kind, flags, number, local)
        front = encode_call_front(*self._head, self._handed, packed.payload)
        if self.entries:
            front, kind = names_of(self.entries) + front, Kind.CALL_WITH_CODE
        place = None if maps.is_identity else maps.forward
        return self._tensor_messages.encode(
            self._peer, kind, flags, number, front, packed.tensors, place
        )


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Returns a mark of the work that computes some of the tensors, if any are on a GPU."""
    if device_streams.HAS_CUDA and any(tensor.is_cuda for tensor in tensors):
        return device_streams.mark()
    return None


def names_of(entries: Sequence[SentCode]) -> bytes:
    """Returns the names of codes, as they stand in front of a call."""
    if len(entries) == 1:
        return code_names((entries[0].number,))
    return code_names([entry.number for entry in entries])


def reply_by_tables(
    tensor_messages: TensorMessages,
    peer: Peer,
    number: int,
    context_id: int,
    message_id: int,
    packed: Packed,
    handed: Sequence[HandedReference],
) -> Outgoing:
    """Returns an answer whose tensors are described by tables, or that goes to this worker."""
    maps = peer.device_maps
    if peer.is_self:
        if not maps.is_identity:
            maps.check(packed.tensors, is_back=True)
        head = context_id, message_id, (), 0, 0
        local = LocalMessage(head, *packed, mark_of(packed.tensors))
        return local_frame(Kind.REPLY, 0, number, local)
    front = encode_reply_front(context_id, message_id, handed, packed.payload)
    place = None if maps.is_identity else maps.back
    return tensor_messages.encode(peer, Kind.REPLY, 0, number, front, packed.tensors, place)


# Calls of a worker to itself.


def own_copy(
    tensor: Tensor,
    context_id: int,
    keeps_graphs: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """Returns a copy of a tensor that a worker sends to itself, as if another had received it.

    In an autograd context (not 0) the copy stays in the graph. Outside of contexts, the copy of a
    leaf is a new leaf, and that of a computed tensor stays in the graph if ``keeps_graphs``.

    Args:
        tensor: The tensor.
        context_id: The context of the message, or 0.
        keeps_graphs: Whether graphs outside of contexts are kept.
        device: The device of the copy; None for that of the tensor.
    """
    if tensor.requires_grad and (context_id or (keeps_graphs and not tensor.is_leaf)):
        with torch.enable_grad():
            copy = tensor.clone() if device is None else tensor.to(device, copy=True)
        if isinstance(tensor, Parameter):
            copy._is_param = True  # for isinstance
        return copy
    copy = tensor.detach()
    copy = copy.clone() if device is None else copy.to(device, copy=True)
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
