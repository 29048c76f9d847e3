"""Parcels: messages with tensors, between Python objects' bytes and frames.

The layers above say what a message is (a head and a pickled payload) and which tensors were
taken out of it. Here the tensors get their table, every buffer its channel, and on the other
side the way back. A message from a worker to itself touches neither bytes nor channels: its
tensors arrive as they are, by reference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from weft import knobs
from weft.agent.agent import Agent, Outgoing
from weft.agent.calls import PendingCall
from weft.agent.peers import Peer
from weft.channel.cma import Puller, PullError
from weft.channel.receiving import in_order, pull_buffers
from weft.channel.sending import prepare
from weft.channel.table import CMA, BufferTable, decode_table
from weft.errors import ProtocolError
from weft.serialize import tensors as tensor_table
from weft.wire.frames import Buffer, Frame, encode_frame
from weft.wire.messages import (
    Kind,
    ParcelSections,
    decode_parcel,
    encode_ints,
    encode_parcel,
)

_log = logging.getLogger("weft")


class Parcel:
    """A message with tensors, as received.

    Attributes:
        head: Bytes of the message kind's fixed layout.
        payload: The pickle; opaque here.
        buffers: The memory of the tensors, as far as it has come.
        channel_table: How the rest comes; empty once all is here.
        externals: Other objects taken out of the pickle; only in a message to oneself.
    """

    __slots__ = (
        "_table",
        "_tensors",
        "_worker",
        "buffers",
        "channel_table",
        "externals",
        "head",
        "payload",
    )

    def __init__(self, sections: ParcelSections, buffers: Sequence[Buffer], worker: str) -> None:
        self.head, self.payload, self._table, self.channel_table = sections
        self.externals: Sequence[object] | None = None
        self.buffers = buffers
        self._worker = worker
        self._tensors: list[Tensor] | None = [] if not self._table else None

    @classmethod
    def local(cls, control: LocalParcel, worker: str) -> Parcel:
        """Returns a message to oneself, whose tensors need no table."""
        parcel = cls(ParcelSections(control.head, control.payload, b"", b""), (), worker)
        parcel._tensors = list(control.tensors)
        parcel.externals = control.externals
        return parcel

    @property
    def is_local(self) -> bool:
        """Whether the message came from this worker itself."""
        return self.externals is not None

    @property
    def some_require_grad(self) -> bool:
        """Whether some of its tensors required grad at the sender; no for a local message."""
        return bool(self._table) and tensor_table.some_require_grad(self._table)

    def flags(self) -> list[tensor_table.GradFlags]:
        """Returns what the autograd layer has to know of each tensor."""
        return tensor_table.grad_flags(self._table)

    def tensors(self, *, detached: bool) -> list[Tensor]:
        """Returns the tensors; each owns its memory.

        Args:
            detached: Whether to return those that required grad at the sender without it.
        """
        if self._tensors is not None:
            return self._tensors
        return tensor_table.rebuild(
            self._table, self.buffers, detached=detached, worker=self._worker
        )


class LocalParcel(NamedTuple):
    """A message from a worker to itself, in place of a frame's control part."""

    head: bytes
    payload: bytes
    tensors: Sequence[Tensor]
    externals: Sequence[object]


class ParcelService:
    """Seals and opens parcels for one worker.

    Args:
        agent: The worker's agent; the service handles its ``SUPPLY`` messages.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._name = agent.info.name
        self._puller = Puller(f"weft-{agent.info.name}-pull")
        self._frame_limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        agent.on(Kind.SUPPLY, self._on_supply, inline=True)
        agent.on_lost(lambda peer: peer.held.close())

    def close(self) -> None:
        """Ends the thread that helps with large pulls."""
        self._puller.close()

    def seal(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        number: int,
        head: bytes,
        payload: bytes,
        tensors: Sequence[Tensor],
        externals: Sequence[object] = (),
    ) -> Outgoing:
        """Returns a message for ``Agent.send``.

        Tensors that will be pulled are kept until the peer has them.

        Args:
            peer: Who will get it.
            kind: What kind of message it is.
            flags: Flags of that kind.
            number: The call that it belongs to, or 0.
            head: Bytes of that kind's fixed layout.
            payload: A pickle; opaque here.
            tensors: The tensors taken out of the pickle, in order.
            externals: Other objects taken out of it; they travel by reference only, to oneself.
        """
        if peer.is_self:
            local = LocalParcel(head, payload, tensors, externals)
            return Frame(kind, flags, number, local, ())  # type: ignore[arg-type]
        if not tensors:
            return encode_frame(kind, flags, number, encode_parcel(head, payload, b"", b""))
        table, flat = tensor_table.describe(tensors)
        buffers = [tensor_table.as_memory(tensor) for tensor in flat]
        channel_table, following = prepare(buffers, peer.channels, peer.held)
        if channel_table:
            self._agent.offered_bytes += sum(buffer.nbytes for buffer in buffers)
            self._agent.offered_bytes -= sum(buffer.nbytes for buffer in following)
        control = encode_parcel(head, payload, table, channel_table)
        return encode_frame(kind, flags, number, control, following)

    def read(self, frame: Frame) -> Parcel:
        """Takes a received message apart, without fetching anything.

        Raises:
            ProtocolError: The message is malformed.
        """
        control = frame.control
        if isinstance(control, LocalParcel):
            return Parcel.local(control, self._name)
        return Parcel(decode_parcel(control), frame.buffers, self._name)

    def fetch(self, peer: Peer, parcel: Parcel) -> None:
        """Fetches the tensors that did not come with the message. May block; not for readers.

        Raises:
            ProtocolError: The message is malformed.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        if parcel.channel_table:
            parcel.buffers = self._fetch(peer, parcel)
            parcel.channel_table = b""

    def open(self, peer: Peer, frame: Frame) -> Parcel:
        """Reads a message and fetches its tensors; see ``read`` and ``fetch``."""
        parcel = self.read(frame)
        if parcel.channel_table:
            self.fetch(peer, parcel)
        return parcel

    def discard(self, peer: Peer, parcel: Parcel) -> None:
        """Lets the sender of a message that nobody will read go of its tensors."""
        if parcel.channel_table:
            self._let_go(peer, self._read_table(parcel))

    def _read_table(self, parcel: Parcel) -> BufferTable:
        sizes = [len(buffer) for buffer in parcel.buffers]
        return decode_table(parcel.channel_table, sizes, self._frame_limit_bytes)

    def _fetch(self, peer: Peer, parcel: Parcel) -> Sequence[Buffer]:
        table = self._read_table(parcel)
        try:
            pulled: Sequence[Buffer] = pull_buffers(
                table, peer.channels, self._agent.pool, self._puller
            )
        except PullError as error:
            pulled = self._ask_for_supply(peer, table, error)
        else:
            self._let_go(peer, table)
            self._agent.pulled_bytes += sum(len(buffer) for buffer in pulled)
        return in_order(table, parcel.buffers, pulled)

    def _let_go(self, peer: Peer, table: BufferTable) -> None:
        self._agent.post_ints(peer, Kind.PULLED, table.token)

    def _ask_for_supply(self, peer: Peer, table: BufferTable, error: PullError) -> Sequence[Buffer]:
        """Has the sender stream what could not be pulled, and stop offering it that way."""
        call = PendingCall(peer.id, peer.name, "resend of tensors", knobs.RPC_TIMEOUT_S.get())
        request = encode_ints(table.token)
        self._agent.calls.ask_and_wait(
            peer, call, lambda number: encode_frame(Kind.SUPPLY, 0, number, request)
        )
        if call.error is not None:
            raise call.error
        assert call.frame is not None
        expected = [entry.size_bytes for entry in table.entries if entry.kind == CMA]
        if [len(buffer) for buffer in call.frame.buffers] != expected:
            raise ProtocolError(
                f"worker {peer.name!r} could not resend tensors that were not readable: {error}"
            )
        return call.frame.buffers

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Streams what the peer could not pull. Inline: it must not wait for a free thread."""
        buffers = peer.held.release(int.from_bytes(frame.control[:8], "little")) or ()
        peer.channels.disable(CMA, f"worker {peer.name!r} cannot read this process's memory")
        self._agent.post(peer, encode_frame(Kind.REPLY, 0, frame.id, b"", buffers))
