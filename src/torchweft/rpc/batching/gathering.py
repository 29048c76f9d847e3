"""Puts calls of other workers into the queue of a batched function without reading them.

Only calls of plain functions, whose arguments are tensors in their message. See "What a batch does
once" in ``docs/protocols/batching.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from torchweft.agent.peers import Peer
from torchweft.autograd.outside import NO_GRAD
from torchweft.errors import UnknownFunction
from torchweft.rpc.batching.queue import BatchQueue
from torchweft.rpc.batching.running import Unread
from torchweft.serialize.values import TENSORS_ALONE
from torchweft.wire.frames import HEADER_BYTES, Frame
from torchweft.wire.messages import (
    NO_CREATION,
    POSITIONAL,
    REMAINING_BYTES,
    Kind,
    decode_call,
    encode_call,
)

_PAYLOADS = {count: payload for payload, count in TENSORS_ALONE.items()}
_REMAINING_S = struct.Struct("<d")


class Gathering:
    """Takes the calls of one batched function, in the thread that reads them.

    Args:
        worker: The ``Worker`` that receives the calls.
        name: The name by which they call the function.
        width: How many arguments it has.
        queue: The queue of its calls.
        is_current: Whether a function is this one.
    """

    def __init__(
        self,
        worker: Any,
        name: bytes,
        width: int,
        queue: BatchQueue,
        is_current: Callable[[object], bool],
    ) -> None:
        self.queue = queue
        self._worker = worker
        self._name = name
        self._is_current = is_current
        fronts = [_front(context_id, name, width) for context_id in (0, NO_GRAD)]
        self._fronts = fronts
        start = REMAINING_BYTES + len(fronts[0])
        self._unread = Unread(self._read, self._is_outdated, self._queue_again, start, width)
        for context_id, front in zip((0, NO_GRAD), fronts, strict=True):
            worker.agent.receiver.take_early([front], partial(self._take, context_id))

    def _take(self, context_id: int, call: Any, frame: Frame) -> bool:
        """Adds a call to the queue; returns False for one that has to be queued as others are."""
        if frame.flags != POSITIONAL:
            return False
        control: Any = frame.control
        call.worker, call.owned, call.frame = self._worker, None, None
        call.function, call.context_id = self._name, context_id
        if call.begins(NO_CREATION, _REMAINING_S.unpack_from(control)[0], call.arrived_s):
            self.queue.put(call, (), control, self._unread)
        return True

    def _read(self, peer: Peer, control: Any) -> Any:
        return self._worker.open(peer, control, decode_call(control)[3], None)

    def _is_outdated(self) -> bool:
        """Whether the name is that of another function by now; then takes no further calls."""
        try:
            if self._is_current(self._worker.reader.resolve(self._name)):
                return False
        except UnknownFunction:
            pass  # The call will say so.
        self._worker.agent.receiver.take_early(self._fronts, None)
        self._worker.gathering.pop(self._name, None)
        return True

    def _queue_again(self, call: Any, control: Any) -> None:
        call.frame = Frame(Kind.CALL, POSITIONAL, call.number, control, ())
        self._worker.agent.receiver.queue_call(call.peer, call)


def _front(context_id: int, name: bytes, width: int) -> bytes:
    """Returns the part of a message in which the calls do not differ."""
    call = encode_call(POSITIONAL, 0.0, NO_CREATION, context_id, 0, name, (), _PAYLOADS[width])
    return bytes(call[HEADER_BYTES + REMAINING_BYTES :])
