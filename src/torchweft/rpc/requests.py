"""Calls and results as messages, and copies for calls of a worker to itself."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.protocol.sessions import Outgoing
from torchweft.serialize.inline import Inlined
from torchweft.serialize.objects import Packed
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.threads.thread_modes import (
    has_dispatch_modes,
    has_function_modes,
    plain_operations,
    transform_level,
)
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import HandedReference, Kind, encode_call, encode_reply
from torchweft.worker.peers import Peer
from torchweft.worker.tensor_messages import LocalMessage, TensorMessages, local_frame

RequestHead = tuple[float, int, int, int, bytes, bytes, bytes]
"""Time limit, creation, context, message, name, span and code of a call; see ``CallHead``."""
TakeBack = Callable[[Peer, Sequence[HandedReference], int], None]
"""Takes back the references and the graph of a message to a worker that could not be sent."""


class Request:
    """A call, or values for a port, before it is sent.

    Args:
        tensor_messages: Encodes tensors that do not stand in the message.
        take_back: Called if the message cannot be sent.
        peer: The receiver.
        kind: ``CALL`` or ``POST``.
        flags: Flags of the frame.
        head: The numbers and names in front of the value, as ``encode_call`` takes them.
        packed: The value.
        inlined: Its tensors as they stand in the message; None for tables, or for this worker.
        handed: The references that the message hands on.
    """

    __slots__ = (
        "_control",
        "_flags",
        "_handed",
        "_head",
        "_kind",
        "_maker",
        "_mark",
        "_packed",
        "_peer",
        "_take_back",
        "_tensor_messages",
    )

    def __init__(
        self,
        tensor_messages: TensorMessages,
        take_back: TakeBack,
        peer: Peer,
        kind: Kind,
        flags: int,
        head: RequestHead,
        packed: Packed,
        inlined: Inlined | None,
        handed: Sequence[HandedReference],
    ) -> None:
        self._tensor_messages = tensor_messages
        self._take_back = take_back
        self._peer = peer
        self._kind = kind
        self._flags = flags
        self._head = head
        self._handed = handed
        self._packed: Packed | None = None
        if inlined is not None:
            self._control = encode_call(*head, handed, packed.payload, inlined[0])
            return
        self._packed = packed
        self._control = b"" if peer.is_self else encode_call(*head, handed, packed.payload)
        self._maker, self._mark = 0, None
        if device_streams.HAS_CUDA and (peer.link is None or peer.unsent):
            # It is encoded in another thread at the first contact, or not at all, as for oneself.
            self._maker = get_ident()
            self._mark = mark_of(packed.tensors)

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call or port."""
        if self._packed is None:
            return encode_frame(self._kind, self._flags, number, self._control)
        return self._by_tables(self._packed, number)

    def _by_tables(self, packed: Packed, number: int) -> Outgoing:
        if has_dispatch_modes() or has_function_modes() or transform_level():
            with plain_operations():
                return self._by_tables(packed, number)
        if self._mark is not None and self._maker != get_ident():
            device_streams.use(self._mark, packed.tensors)
        if self._peer.is_self:
            remaining_s, creation, context_id, message_id, *named = self._head
            head = remaining_s, creation, *named, (context_id, message_id, (), 0, 0)
            local = LocalMessage(head, *packed, self._mark)
            return local_frame(self._kind, self._flags, number, local)
        maps = self._peer.device_maps
        place = None if maps.is_identity else maps.forward
        return self._tensor_messages.encode(
            self._peer, self._kind, self._flags, number, self._control, packed.tensors, place
        )

    def take_back(self, *, keeps_graph: bool = False) -> None:
        """Takes back the references and the graph of a message that could not be sent.

        Args:
            keeps_graph: Whether the graph is kept, as the receiver may have the message.
        """
        self._take_back(self._peer, self._handed, 0 if keeps_graph else self._head[3])


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Returns a mark of the work that computes some of the tensors, if any are on a GPU."""
    if device_streams.HAS_CUDA and any(tensor.is_cuda for tensor in tensors):
        return device_streams.mark()
    return None


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
    front = encode_reply(context_id, message_id, handed, packed.payload)
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
