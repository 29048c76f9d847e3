"""Calls and results as messages, ready to be numbered and sent."""

from __future__ import annotations

from torchweft.agent.peers import Outgoing, Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import TensorMessages
from torchweft.autograd.outside import OutsideRecords
from torchweft.serialize.objects import Packed
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
