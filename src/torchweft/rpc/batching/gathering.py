"""Puts calls of other workers into the queue of a batched function without reading them.

Only calls with one to three arguments, all of them tensors in their message. See "What a batch does
once" in ``docs/protocols/batching.md``.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchweft.agent.peers import Peer
from torchweft.ids import ReferenceId
from torchweft.rpc.batching.queue import BatchQueue
from torchweft.rpc.calls import CALL_METHOD
from torchweft.serialize.values import encode
from torchweft.wire.frames import HEADER_BYTES, Frame
from torchweft.wire.messages import (
    NO_CREATION,
    NO_GRAD,
    POSITIONAL,
    REMAINING_BYTES,
    Kind,
    decode_call,
    encode_call,
)

WIDTHS = frozenset({1, 2, 3})
"""How many arguments calls may have."""


def _payload(*before: Any, width: int) -> bytes:
    """Returns the payload of a call with some values and so many tensors as arguments."""
    payload = encode((*before, *(torch.zeros(1) for _ in range(width))), [], main_by_name=True)
    assert payload is not None
    return payload


_REMAINING_S = struct.Struct("<d")


class Gathering:
    """Takes the calls of one batched function, in the thread that reads them.

    Args:
        worker: The ``Worker`` that receives the calls.
        key: Its place in ``Worker.gathering``.
        name: The name in their messages.
        payload: The payload of their messages.
        function: What is noted as the called function.
        width: How many arguments it has.
        queue: The queue of its calls.
    """

    def __init__(
        self,
        worker: Any,
        key: object,
        name: bytes,
        payload: bytes,
        function: Any,
        width: int,
        queue: BatchQueue,
    ) -> None:
        self.queue = queue
        self._worker = worker
        self._key = key
        self._function = function
        fronts = {each: _front(each, name, payload) for each in (0, NO_GRAD)}
        self._fronts = list(fronts.values())
        self.start = REMAINING_BYTES + len(fronts[0])
        self.width = width
        for context_id, front in fronts.items():
            worker.agent.receiver.take_early([front], partial(self._take, context_id))
        worker.gathering[key] = self

    def end(self) -> None:
        """Takes no further calls; safe in a finalizer."""
        self._worker.agent.receiver.take_early(self._fronts, None)
        self._worker.gathering.pop(self._key, None)

    def bound(self) -> tuple[Any, ...] | None:
        """Returns the object whose method is called, or nothing; None if it is gone."""
        return ()

    def is_current(self) -> bool:
        """Whether the calls are still those of this function."""
        raise NotImplementedError

    def args_in(self, content: Any) -> Any:
        """Returns the arguments in the value of a message."""
        return content

    def _take(self, context_id: int, call: Any, frame: Frame) -> bool:
        """Adds a call to the queue; returns False for one that has to be queued as others are."""
        bound = self.bound()
        if frame.flags != POSITIONAL or bound is None:
            return False
        control: Any = frame.control
        call.worker, call.owned, call.frame = self._worker, None, None
        call.function, call.context_id = self._function, context_id
        if call.begins(NO_CREATION, _REMAINING_S.unpack_from(control)[0], call.arrived_s):
            self.queue.put(call, bound, control, self)
        return True

    def read(self, peer: Peer, message: Any) -> Any:
        """Returns the arguments in a message; see ``Unread``."""
        content = self._worker.decoder.open(peer, message, decode_call(message)[3], None)
        return self.args_in(content)

    def is_outdated(self) -> bool:
        """Whether the calls are those of another function by now; if so, takes no further ones."""
        try:
            if self.is_current():
                return False
        except Exception:
            pass  # Looking it up may run the program's code. The call will say what is wrong.
        self.end()
        return True

    def queue_again(self, call: Any, message: Any) -> None:
        """Queues a call as if it had just been read."""
        call.frame = Frame(Kind.CALL, POSITIONAL, call.number, message, ())
        self._worker.agent.receiver.queue_call(call.peer, call)


class OfFunction(Gathering):
    """Takes the calls of a plain function.

    Args:
        worker: The ``Worker`` that receives the calls.
        name: The function's name.
        width: How many arguments it has.
        queue: The queue of its calls.
        is_same: Whether a function is this one.
    """

    def __init__(
        self,
        worker: Any,
        name: bytes,
        width: int,
        queue: BatchQueue,
        is_same: Callable[[object], bool],
    ) -> None:
        self._name = name
        self._is_same = is_same
        super().__init__(worker, name, name, _payload(width=width), name, width, queue)

    def is_current(self) -> bool:
        """Whether the name is still that of this function."""
        return self._is_same(self._worker.reader.resolve(self._name))


class OfMethod(Gathering):
    """Takes the calls of a method of a value of this worker, while the value lives.

    Args:
        worker: The ``Worker`` that receives the calls.
        key: Its place in ``Worker.gathering``.
        peer: A caller.
        reference: The reference by which it calls.
        method: The method.
        width: How many arguments it has.
        queue: The queue of its calls.
        is_same: Whether a function is this one.
    """

    def __init__(
        self,
        worker: Any,
        key: object,
        peer: Peer,
        reference: ReferenceId,
        method: Any,
        width: int,
        queue: BatchQueue,
        is_same: Callable[[object], bool],
    ) -> None:
        self._reference = reference
        self._name: str = method.__name__
        self._is_same = is_same
        self._value = weakref.ref(method.__self__, lambda _: self.end())
        for other in list(worker.gathering.values()):
            if isinstance(other, OfMethod) and not other.is_owned():
                other.end()  # A value may outlive many references to it.
        payload = _payload(*reference, self._name, None, width=width)
        super().__init__(worker, key, CALL_METHOD, payload, method.__func__, width, queue)

    def bound(self) -> tuple[Any, ...] | None:
        """Returns the value; None if it is gone."""
        value = self._value()
        return None if value is None else (value,)

    def is_owned(self) -> bool:
        """Whether the value is still referred to by this reference."""
        return bool(self._worker.references.is_owned(self._reference))

    def is_current(self) -> bool:
        """Whether the value is still referred to, and has this method."""
        return self.is_owned() and self._is_same(getattr(self._value(), self._name))

    def args_in(self, content: Any) -> Any:
        """Returns the arguments of the method among those of ``call_method``."""
        return content[5:]


def _front(context_id: int, name: bytes, payload: bytes) -> bytes:
    """Returns the part of a message in which the calls do not differ.

    From message to message, only the time limit before it and the tensors behind it differ.
    """
    call = encode_call(POSITIONAL, 0.0, NO_CREATION, context_id, 0, name, (), payload)
    return bytes(call[HEADER_BYTES + REMAINING_BYTES :])
