"""Tensors that did not arrive over their channel: the receiver asks for them again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchweft.agent.agent import Agent
from torchweft.agent.calls import PendingCall
from torchweft.agent.open_calls import SimpleRequest
from torchweft.agent.peers import Peer
from torchweft.channel.table import ChannelKind
from torchweft.errors import ProtocolError
from torchweft.wire.frames import Buffer, encode_frame
from torchweft.wire.messages import Kind, decode_ints, encode_ints


def ask_for_supply(
    agent: Agent,
    peer: Peer,
    token: int,
    kind: ChannelKind,
    sizes: list[int],
    reason: Exception,
) -> Sequence[Buffer]:
    """Has the sender of a message resend its buffers of one kind behind a message. Blocks.

    Raises:
        WorkerLost: The sender was lost before the buffers came.
        ProtocolError: The sender no longer has the buffers, or sent buffers of other sizes.
    """
    call = PendingCall(peer.id, peer.name, "resend of tensors", math.inf)
    request = encode_ints(token, kind)
    agent.calls.ask_and_wait(
        peer, call, SimpleRequest(lambda number: encode_frame(Kind.SUPPLY, 0, number, request))
    )
    if call.error is not None:
        raise call.error
    assert call.frame is not None
    if [len(buffer) for buffer in call.frame.buffers] != sizes:
        raise ProtocolError(
            f"worker {peer.name!r} could not resend tensors that did not come: {reason}"
        )
    return call.frame.buffers


def read_request(control: Buffer) -> tuple[int, int]:
    """Decodes a ``SUPPLY``: the token of the message, and the kind of the buffers.

    Raises:
        ProtocolError: The request is malformed.
    """
    values = decode_ints(control)
    if len(values) != 2:
        raise ProtocolError(f"a request to send again has {len(values)} numbers")
    return values[0], values[1]
