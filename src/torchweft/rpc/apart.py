"""Messages whose tensors do not stand in the frame, and those of a worker to itself."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.protocol.sessions import Outgoing
from torchweft.serialize.objects import Packed
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.threads.interrupts import call
from torchweft.threads.thread_modes import MODES, plain_operations
from torchweft.wire.frames import HEADER_BYTES
from torchweft.wire.messages import CallHead, HandedReference, Kind, encode_reply
from torchweft.worker.peers import Peer
from torchweft.worker.tensor_messages import LocalMessage, TensorMessages, local_frame


class Apart:
    """The tensors of a request that do not stand in its frame, or its value for this worker itself.

    Args:
        tensor_messages: Encodes the tensors.
        peer: The receiver.
        head: The head of a call to oneself.
        packed: The value.
    """

    def __init__(
        self, tensor_messages: TensorMessages, peer: Peer, head: CallHead, packed: Packed
    ) -> None:
        self._tensor_messages = tensor_messages
        self._head = head
        self._packed = packed
        self._maker, self._mark = 0, None
        if device_streams.HAS_CUDA and (peer.link is None or peer.unsent):
            # It is encoded in another thread at the first contact, or not at all, as for oneself.
            self._maker = get_ident()
            self._mark = mark_of(packed.tensors)

    def message(
        self, peer: Peer, kind: Kind, flags: int, number: int, frame: bytearray
    ) -> Outgoing:
        """Returns the message to send; see ``Request``."""
        if any(map(call, MODES)):
            with plain_operations():
                return self.message(peer, kind, flags, number, frame)
        packed = self._packed
        if self._mark is not None and self._maker != get_ident():
            device_streams.use(self._mark, packed.tensors)
        if peer.is_self:
            return local_frame(kind, flags, number, LocalMessage(self._head, *packed, self._mark))
        maps = peer.device_maps
        place = None if maps.is_identity else maps.forward
        control = bytes(memoryview(frame)[HEADER_BYTES:])
        return self._tensor_messages.encode(
            peer, kind, flags, number, control, packed.tensors, place
        )


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
