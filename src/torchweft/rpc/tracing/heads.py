"""What a trace keeps of a message: its header, and the numbers at the begin of its control part.

No byte of a value is kept: the numbers of each kind of message have a fixed size. They are copied
when the message is sent or read, and only understood when the trace is fetched.
"""

from __future__ import annotations

from typing import NamedTuple

from torchweft.autograd import codec
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import (
    CALL_HEAD_BYTES,
    NO_CREATION,
    NO_GRAD,
    REPLY_HEAD_BYTES,
    TABLES,
    Kind,
    sizes_of_call,
    sizes_of_reply,
)

_CALL, _REPLY, _POST = int(Kind.CALL), int(Kind.REPLY), int(Kind.POST)
_GRADIENTS = int(Kind.GRADIENTS)

LENGTHS: dict[int, int] = {
    _CALL: CALL_HEAD_BYTES,
    _POST: CALL_HEAD_BYTES,
    _REPLY: REPLY_HEAD_BYTES,
    _GRADIENTS: codec.HEAD_BYTES,
    int(Kind.BACKWARD): codec.NAME_BYTES,
}
"""Bytes to keep of the control part, by the kind of message."""


def head_in(kind: int, control: Buffer) -> bytes:
    """Returns what is kept of a control part."""
    return bytes(control[: LENGTHS.get(kind, 0)])


class Ids(NamedTuple):
    """The numbers of a message.

    Attributes:
        context_id: Its autograd context, or 0.
        message_id: Its recorded message, or that which its gradients belong to; or 0.
        creation: The number of the reference that it creates, or ``NO_CREATION``.
        inline_bytes: Bytes of tensors inside of its control part, with their description.
    """

    context_id: int = 0
    message_id: int = 0
    creation: int = NO_CREATION
    inline_bytes: int = 0


def ids_in(kind: int, flags: int, head: bytes, control_bytes: int) -> Ids:
    """Returns the numbers in what was kept of a message.

    Args:
        kind: Its kind.
        flags: Its flags.
        head: The return value of ``head_in``.
        control_bytes: Size of its control part.
    """
    if kind == _GRADIENTS and len(head) == codec.HEAD_BYTES:
        context_id, message_id, before = codec.ids_in(head)
        inline_bytes = 0 if flags & TABLES else max(control_bytes - before, 0)
        return Ids(context_id, message_id, NO_CREATION, inline_bytes)
    if kind == Kind.BACKWARD and len(head) == codec.NAME_BYTES:
        return Ids(codec.context_in(head))
    if kind in (_CALL, _POST) and len(head) == CALL_HEAD_BYTES:
        found = sizes_of_call(head)
    elif kind == _REPLY and len(head) == REPLY_HEAD_BYTES:
        found = sizes_of_reply(head)
    else:
        return Ids()
    before = found.before_tensors
    inline_bytes = 0 if flags & TABLES else max(control_bytes - before, 0)
    context_id = context_of(found.context_id)
    return Ids(context_id, found.message_id, found.creation, inline_bytes)


def context_of(context_id: int) -> int:
    """Returns the context that a message names, or 0 where it has none."""
    return 0 if context_id == NO_GRAD else context_id
