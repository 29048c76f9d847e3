"""Calls and results as messages: requests, values of small calls, copies for own calls."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import TensorMessages
from torchweft.autograd.outside import OutsideRecords
from torchweft.errors import ProtocolError, ReferenceGone
from torchweft.ids import ReferenceId
from torchweft.protocol.connecting import Outgoing
from torchweft.rpc.handles import Handle
from torchweft.serialize.functions import name_of
from torchweft.serialize.objects import Packed
from torchweft.serialize.reading import Reader
from torchweft.wire.messages import HandedReference, Kind, encode_compact_call


class Request:
    """A message whose content is pickled, with its tensors and references taken out."""

    __slots__ = (
        "_handed",
        "_head",
        "_kind",
        "_message_id",
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
        head: bytes,
        packed: Packed,
        handed: tuple[HandedReference, ...],
        message_id: int = 0,
        kind: Kind = Kind.CALL,
    ) -> None:
        self._tensor_messages = tensor_messages
        self._references = references
        self._outside = outside
        self._peer = peer
        self._head = head
        self._packed = packed
        self._handed = handed
        self._message_id = message_id
        self._kind = kind

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call."""
        packed = self._packed
        return self._tensor_messages.encode(
            self._peer,
            self._kind,
            0,
            number,
            self._head,
            packed.payload,
            packed.tensors,
            packed.externals,
        )

    def take_back(self) -> None:
        """Takes back the references and the graph of a message that could not be sent."""
        for handed in self._handed:
            self._references.undeliverable(handed, self._peer)
        if self._message_id:
            self._outside.take_back(self._message_id)


class CompactRequest:
    """A call of a function by name with a few small plain values."""

    __slots__ = (
        "_context_id",
        "_creation",
        "_function",
        "_message_id",
        "_outside",
        "_remaining_s",
        "_values",
    )

    def __init__(
        self,
        outside: OutsideRecords,
        remaining_s: float,
        creation: int,
        context_id: int,
        message_id: int,
        function: bytes,
        values: bytes,
    ) -> None:
        self._outside = outside
        self._remaining_s = remaining_s
        self._creation = creation
        self._context_id = context_id
        self._message_id = message_id
        self._function = function
        self._values = values

    def message(self, number: int) -> Outgoing:
        """Returns the message to send, under the number of its call."""
        return [
            encode_compact_call(
                number,
                self._remaining_s,
                self._creation,
                self._context_id,
                self._message_id,
                self._function,
                self._values,
            )
        ]

    def take_back(self) -> None:
        """Releases the graph behind the tensors of a request that could not be sent."""
        if self._message_id:
            self._outside.take_back(self._message_id)


# Further values of small calls: functions by name, and references that go home. Programs written
# for PyTorch's RPC call methods of remote objects through their own function, which takes the
# method and the reference to the object. So both kinds are as common as tensors. A reference goes
# home, to the owner of its value, without a handover: the caller keeps its own reference until the
# call has ended.

_REFERENCE = struct.Struct("<qqq")
_FUNCTION, _HOMECOMER = b"f", b"r"
_FUNCTION_TYPES = (FunctionType, BuiltinFunctionType, type)


def value_encoder(peer: Peer) -> Callable[[Any], bytes | None]:
    """Returns the encoder of further values of small calls, for calls to ``peer``."""

    def encode(value: Any) -> bytes | None:
        if isinstance(value, Handle):
            if value.id.owner != peer.id:
                return None
            value.check_travels()
            return _HOMECOMER + _REFERENCE.pack(*value.id)
        if isinstance(value, _FUNCTION_TYPES):
            name = name_of(value, peer.main_by_name)
            return None if name is None else _FUNCTION + name
        return None

    return encode


def value_decoder(
    reader: Reader, references: ReferenceKeeper, reference_type: type[Handle]
) -> Callable[[bytes], Any]:
    """Returns the decoder of further values of small calls.

    Args:
        reader: Finds the functions.
        references: Counts the references that arrive.
        reference_type: Class of the references.
    """
    resolve = reader.resolve

    def decode(data: bytes) -> Any:
        if data[:1] == _FUNCTION:
            return resolve(data[1:])
        if data[:1] != _HOMECOMER or len(data) != 1 + _REFERENCE.size:
            raise ProtocolError(f"a message has a value of unknown kind: {data[:20]!r}")
        reference = ReferenceId(*_REFERENCE.unpack_from(data, 1))
        if not references.came_home(reference):
            raise ReferenceGone(f"{reference} arrived after this worker had dropped its references")
        return reference_type.from_received(references, reference)

    return decode


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
