"""How one side of a simulated session reaches the other: a connection that begins with a greeting.

::

    HELLO   intent, life of the sender, life that is meant, number of the attempt, position
    ANSWER  verdict, position
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tests.simulation.streams import End

if TYPE_CHECKING:
    from tests.simulation.session_node import Half

HELLO = struct.Struct("<Bqqqq")
ANSWER = struct.Struct("<Bq")
RESUME, ASK = 1, 2
WELCOME, REFUSED = 1, 2


class Dial:
    """One try to reach the other side of a session."""

    def __init__(self, half: Half) -> None:
        self._half = half
        self._node = node = half.node
        self._received = b""
        self._end: End | None = None
        self._is_decided = False
        patience_s = node.limits.patience_s
        node.clock.later(patience_s, self._fail, "it does not answer")
        node.streams.dial(node.place, half.peer_place, self._on_open, self._on_refused)

    def _on_refused(self) -> None:
        self._fail("nobody listens there", is_final=True)

    def _on_open(self, end: End) -> None:
        half, node = self._half, self._node
        if self._is_decided or half.is_lost or not node.is_alive:
            end.close()
            return
        if not end.is_open:
            self._fail("it hangs up at once")
            return
        self._end = end
        end.on_bytes, end.on_broken = self._on_bytes, self._on_broken
        if half.is_dialler:
            # First the old connection ends: what is received from now on would not be told.
            half.break_off("it was silent")
            half.attempt += 1
        intent = RESUME if half.is_dialler else ASK
        greeting = HELLO.pack(intent, node.id, half.peer, half.attempt, half.incoming.position)
        assert end.write(greeting) == len(greeting)

    def _on_broken(self) -> None:
        self._fail("it hangs up")

    def _on_bytes(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < ANSWER.size or self._is_decided or self._half.is_lost:
            return
        self._is_decided = True
        half, end = self._half, self._end
        assert end is not None
        verdict, position = ANSWER.unpack_from(self._received)
        if verdict == WELCOME and half.is_dialler:
            half.connected(end, position, self._received[ANSWER.size :])
            return
        end.close()
        now_s = self._node.clock.now_s
        if verdict == WELCOME:
            half.contact.dialled(now_s)
        else:
            half.contact.dial_failed(now_s, "that life is over", is_final=True)
        half.attend()

    def _fail(self, cause: str, is_final: bool = False) -> None:
        if self._is_decided or not self._node.is_alive:
            return
        self._is_decided = True
        is_there = self._end is not None
        if self._end is not None:
            self._end.close()
        if not self._half.is_lost:
            now_s = self._node.clock.now_s
            self._half.contact.dial_failed(now_s, cause, is_final=is_final, is_there=is_there)
            self._half.attend()
