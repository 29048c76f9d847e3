"""Simulated connections up to the end of their greetings: the sockets of the shell, no decisions.

::

    acceptor    CHALLENGE
    dialler     HELLO    the sender, and what ``Hello`` says
    acceptor    WELCOME  a refusal or none, and a position

The dialler's part is a ``Dialled``, the acceptor's an ``Accepted``. Both report to the machine of
the peer what happened, and carry out its answers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.streams import End
from torchweft.engine.protocol.connecting import (
    Failure,
    Hello,
    Purpose,
    Terms,
    Verdict,
    check_welcome,
    failure_of,
)

if TYPE_CHECKING:
    from tests.simulation.connections import Half, Node

_HEAD = struct.Struct("<H")
SYN_PAUSE_S = 1.0
"""After this time a system repeats an unanswered connection attempt."""


class Talk:
    """Messages over one end of a connection; bytes that follow them are kept."""

    def __init__(
        self, end: End, on_message: Callable[[Any], None], on_broken: Callable[[], None]
    ) -> None:
        self.end = end
        self.rest = bytearray()
        self._unsent = b""
        self._is_closing = False
        self._on_message: Callable[[Any], None] | None = on_message
        end.on_bytes, end.on_room, end.on_broken = self._on_bytes, self._write, on_broken

    def say(self, **message: Any) -> None:
        text = json.dumps(message).encode()
        self._unsent += _HEAD.pack(len(text)) + text
        self._write()

    def close(self) -> None:
        """Ends the connection as soon as the network has taken everything."""
        self._is_closing = True
        self._write()

    def _write(self) -> None:
        if self._unsent and self.end.is_open:
            self._unsent = self._unsent[self.end.write(self._unsent) :]
        if self._is_closing and not self._unsent:
            self.end.close()

    def listen(self, on_message: Callable[[Any], None] | None) -> None:
        """Sets the function that gets the next message; with None, messages are kept."""
        self._on_message = on_message
        self._on_bytes(b"")

    def _on_bytes(self, data: bytes) -> None:
        self.rest += data
        if self._on_message is None or len(self.rest) < _HEAD.size:
            return
        (size,) = _HEAD.unpack_from(self.rest)
        if len(self.rest) >= _HEAD.size + size:
            text = bytes(self.rest[_HEAD.size : _HEAD.size + size])
            del self.rest[: _HEAD.size + size]
            on_message, self._on_message = self._on_message, None
            on_message(json.loads(text))

    @property
    def unsent(self) -> bytes:
        """The bytes that the network has not taken yet; they go before all others."""
        return self._unsent


class Dialled:
    """One attempt to reach another worker: for a first connection, to resume, or to probe."""

    def __init__(self, half: Half, purpose: Purpose, terms: Terms | None, limit_s: float) -> None:
        self._half = half
        self._node = half.node
        self._purpose = purpose
        self._terms = terms
        self._talk: Talk | None = None
        self._is_over = False
        now_s = self._node.clock.now_s
        self._node.clock.later(max(limit_s - now_s, 0.0), self._on_limit)
        self._ask_system()

    def _ask_system(self) -> None:
        if not self._is_over and self._talk is None and self._node.is_alive:
            streams, half = self._node.streams, self._half
            streams.dial(self._node.place, half.peer_place, self._on_open, self._on_refused)
            self._node.timeline.later(SYN_PAUSE_S, self._ask_system)

    def _on_refused(self) -> None:
        if self._talk is None:
            self._fail(Failure.REFUSED, "nobody listens there")

    def _on_limit(self) -> None:
        # The system of a busy worker accepts its connections.
        is_there = self._talk is not None
        self._fail(Failure.BUSY if is_there else Failure.BROKEN, "it does not answer")

    def _on_broken(self) -> None:
        self._fail(Failure.BROKEN, "it hangs up")

    def _on_open(self, end: End) -> None:
        if self._is_over or self._talk is not None or not self._node.is_alive:
            end.close()
        elif not end.is_open:
            self._fail(Failure.BROKEN, "it hangs up at once")
        else:
            self._half.machine.reached(self._node.clock.now_s)
            self._talk = Talk(end, self._on_challenge, self._on_broken)

    def _on_challenge(self, _: Any) -> None:
        half, machine, terms = self._half, self._half.machine, self._terms
        assert self._talk is not None
        position = 0
        if self._purpose is Purpose.LINK and not machine.offer():
            self._end()
            half.go_on()
            return
        if self._purpose is Purpose.RESUME:
            self._terms = terms = machine.next_attempt()
            if terms is None:
                self._end()
                return
            position = half.stop()
        assert terms is not None
        said = Hello.about(self._purpose, half.peer, terms, position)
        self._talk.listen(self._on_answer)
        self._talk.say(sender=self._node.id, place=self._node.place, facts=said.facts())

    def _on_answer(self, answer: Any) -> None:
        try:
            check_welcome(answer["refusal"])
        except ConnectionError as error:
            self._fail(failure_of(error), str(error))
        else:
            self._on_welcome(answer["position"])

    def _on_welcome(self, position: int) -> None:
        half, talk = self._half, self._talk
        assert talk is not None
        if self._purpose is Purpose.LINK:
            obstacle = half.adopt(self._terms)
            if obstacle:
                self._fail(Failure.REFUSED, obstacle)
                return
            self._is_over = True
            half.go_on()
            half.connected(talk, 0)
        elif self._purpose is Purpose.RESUME:
            self._is_over = True
            half.resume(talk, position)
        else:
            self._end()
            half.machine.probed(self._node.clock.now_s)
            half.attend()

    def fail(self, cause: str) -> None:
        """Ends this attempt, as if its connection had broken."""
        self._fail(Failure.BROKEN, cause)

    def _end(self) -> None:
        self._is_over = True
        if self._talk is not None:
            self._talk.end.close()

    def _fail(self, failure: Failure, cause: str) -> None:
        if self._is_over or not self._node.is_alive:
            return
        self._end()
        if self._purpose is Purpose.LINK:
            self._half.dial_failed(failure, cause)
        else:
            self._half.redial_failed(failure, cause)


class Accepted:
    """A connection that another worker has made, until its greeting is answered."""

    def __init__(self, node: Node, end: End) -> None:
        self._node = node
        self._talk = Talk(end, self._on_hello, lambda: None)
        self._talk.say()

    def _on_hello(self, told: Any) -> None:
        said = Hello.from_facts(told["facts"])
        stray = said.stray_answer(self._node.id, is_unix=False)
        if stray is not None:
            self._answer(stray.text)
            return
        half = self._node.half_of(told["sender"], told["place"])
        answer = half.machine.hello(self._node.id, said)
        self._node.note("is asked by", half.peer, said.purpose.name, answer.verdict.name)
        if answer.must_dial:
            half.repeat_offer()
        if answer.verdict is Verdict.ACCEPT:
            self._node.pause(self._welcome, half, said.terms)
        elif answer.verdict in (Verdict.RESUME, Verdict.WELCOME_AGAIN):
            self._resume(half, said)
        elif answer.verdict is Verdict.HANG_UP:
            self._talk.end.close()
        else:
            self._answer(answer.text)
            if answer.verdict is Verdict.BREAK_OFF:
                half.break_off("the other side says that it broke")

    def _answer(self, refusal: str) -> None:
        self._talk.say(refusal=refusal, position=0)
        self._talk.close()

    def _welcome(self, half: Half, terms: Terms | None) -> None:
        if not self._talk.end.is_open:
            half.machine.accept_failed()
            return
        self._talk.say(refusal="", position=0)
        self._node.pause(self._adopt, half, terms)

    def _adopt(self, half: Half, terms: Terms | None) -> None:
        obstacle = half.adopt(terms)
        if obstacle:
            half.machine.accept_failed()
            self._talk.end.close()
        else:
            half.connected(self._talk, 0)

    def _resume(self, half: Half, said: Hello) -> None:
        if not half.machine.take_attempt(said.attempt):
            self._talk.end.close()  # A newer attempt has overtaken it.
            return
        position = half.stop()
        if self._talk.end.is_open:
            self._talk.say(refusal="", position=position)
        half.resume(self._talk, said.position)
