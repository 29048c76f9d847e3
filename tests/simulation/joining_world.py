"""A rendezvous store and workers that join through it, on a simulated timeline.

The machines are those of ``engine.protocol.leaving``; they yield a worker's requests to the
store and to other workers. Every operation takes some time; workers die between any two.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.timeline import Timeline
from torchweft.engine.protocol.connecting import Gone
from torchweft.engine.protocol.joining import (
    PRESENT,
    Ask,
    Forget,
    Introduce,
    Request,
    Steps,
    Wait,
    leave_open,
)
from torchweft.engine.protocol.registration import Registration, Roster
from torchweft.errors import DuplicateName

POLL_S = 0.02


class Store:
    """A rendezvous store: each operation is atomic."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False

    def perform(self, request: Request) -> Any:
        if self.is_gone:
            raise RuntimeError("connection reset")
        assert isinstance(request, Ask)
        return getattr(self, f"_{request.operation}")(request.key, *request.values)

    def _set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def _get(self, key: str) -> bytes:
        return self.values[key]

    def _glance(self, key: str) -> str:
        return self.values[key].decode()

    def _has(self, key: str) -> bool:
        return key in self.values

    def _peek(self, key: str) -> bytes | None:
        return self.values.get(key)

    def _sign(self, key: str, value: bytes) -> str:
        return value.decode()

    def _verify(self, key: str, text: str) -> bytes:
        return text.encode()

    def _remove(self, key: str) -> None:
        self.values.pop(key, None)

    def _swap(self, key: str, expected: str, desired: str) -> str:
        text = self.values.get(key, b"").decode()
        if text == expected:
            self.values[key] = desired.encode()
            return desired
        return text

    def _set_once(self, key: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


@dataclass(eq=False)
class Life:
    """One life of a worker that joins.

    Attributes:
        registration: The worker's registration; its id is known once the worker has joined.
        started_s: When it began.
        pace: How fast it performs its operations.
        result: The result of its machine, once there is one.
        error: Why it has not joined.
        ended_s: When joining succeeded or failed.
        roster: In an open group, the workers that it knows.
    """

    registration: Registration
    started_s: float
    pace: float
    is_alive: bool = True
    result: Any = None
    error: Exception | None = None
    ended_s: float | None = None
    roster: Roster[Life] | None = None
    is_member: bool = False
    signed: Registration | None = None
    """In an open group, its registration in the table, if that is written next."""
    token: str = ""
    """In an open group, the token of the run, once it has a place."""
    kept: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return not self.is_alive


class Joiners:
    """Runs the machines of workers that join.

    Args:
        chance: All choices.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.timeline = Timeline()
        self.store = Store()
        self.lives: list[Life] = []
        self.trace: list[tuple[Any, ...]] = []
        self.slowness_s = chance.choice((0.001, 0.01, 0.1))

    def clock(self) -> float:
        return self.timeline.now_s

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.clock(), 3), *what))

    def begin(self, registration: Registration) -> Life:
        life = Life(registration, self.clock(), self.chance.choice((1.0, 0.1)))
        self.lives.append(life)
        self.note(registration.name, registration.id, "begins")
        return life

    def kill(self, life: Life) -> None:
        self.note(life.registration.name, life.registration.id, "dies")
        life.is_alive = False
        for answer in life.kept:
            self.later(answer)
        life.kept.clear()

    def later(self, what: Callable[[], None], pace: float = 1.0) -> None:
        self.timeline.later(self.slowness_s * self.chance.random() ** 2 / pace, what)

    def run(
        self,
        life: Life,
        steps: Steps[Any],
        then: Callable[[Any], None],
        otherwise: Callable[[Exception], None],
    ) -> None:
        """Runs a machine until it or the life ends."""

        def go_on(move: Callable[[], Request]) -> None:
            if not life.is_alive:
                return
            try:
                request = move()
            except StopIteration as end:
                then(end.value)
            except Exception as error:
                self.note(life.registration.name, life.registration.id, "fails", repr(error))
                otherwise(error)
            else:
                self.note(life.registration.name, life.registration.id, request)
                self.later(lambda: self._perform(life, request, answer), life.pace)

        def answer(value: Any, error: Exception | None = None) -> None:
            if error is None:
                go_on(lambda: steps.send(value))
            else:
                go_on(lambda: steps.throw(error))

        go_on(lambda: next(steps))

    def _perform(self, life: Life, request: Request, answer: Callable[..., None]) -> None:
        if not life.is_alive:
            return
        if isinstance(request, Introduce):
            self._introduce(life, request, answer)
        elif isinstance(request, Forget):
            assert life.roster is not None
            forgotten = life.roster.by_id.get(request.other.id)
            if forgotten is not None:
                life.roster.retire(forgotten)
            answer(None)
        elif isinstance(request, Wait):
            self._wait(life, request, self.clock() + request.limit_s, answer)
        else:
            try:
                value = self.store.perform(request)
            except RuntimeError as error:
                answer(None, error)
                return
            if request.operation == "sign":
                life.signed = Registration.decode(request.values[0])
            elif request.operation == "swap" and (request.key, value) == (
                PRESENT,
                request.values[1],
            ):
                assert life.signed is not None
                life.registration = life.signed
            answer(value)

    def leave(self, worker: int, token: str) -> None:
        """Takes a worker out of the store, step by step; it may be killed before a step."""
        steps = leave_open(worker, token)
        is_killed = self.chance.random() < 0.2

        def go_on(value: Any = None) -> None:
            if is_killed and self.chance.random() < 0.3:
                return
            with contextlib.suppress(StopIteration):
                request = steps.send(value)
                self.later(lambda: go_on(self.store.perform(request)))

        go_on()

    def _wait(self, life: Life, request: Wait, end_s: float, answer: Callable[..., None]) -> None:
        """Waits as the shell does: a store that is gone has no key."""
        if not life.is_alive:
            return
        if not self.store.is_gone and request.key in self.store.values:
            answer(True)
        elif self.clock() >= end_s:
            answer(False)
        else:
            pause_s = min(POLL_S, end_s - self.clock())
            self.timeline.later(pause_s, lambda: self._wait(life, request, end_s, answer))

    # Introductions

    def _introduce(self, life: Life, request: Introduce, answer: Callable[..., None]) -> None:
        results: list[Exception | None] = [None] * len(request.others)
        unanswered = set(range(len(request.others)))

        def answered(number: int, error: Exception | None, refusal: Exception | None) -> None:
            if refusal is not None and unanswered:
                unanswered.clear()
                answer(None, refusal)
            elif number in unanswered:
                unanswered.discard(number)
                results[number] = error
                if not unanswered:
                    answer(results)

        for number, other in enumerate(request.others):
            target = next(each for each in self.lives if each.registration == other)
            if not request.is_namesake:
                assert life.roster is not None
                if life.roster.is_replaced(other) or self._answers(life.roster, other):
                    self.later(lambda n=number: answered(n, ConnectionError("replaced"), None))
                    continue
                if life.roster.arrival(other)[0] is None:
                    life.roster.admit(target)

            def tell(
                error: Exception | None, refusal: Exception | None, number: int = number
            ) -> None:
                self.later(lambda: answered(number, error, refusal))

            self.later(lambda target=target, tell=tell: self._hear(target, life, tell))

    def _answers(self, roster: Roster[Life], registration: Registration) -> bool:
        """Returns whether a former life answers whose name or rank a new life claims.

        Half of those that live do not answer in time.
        """
        known, former = roster.arrival(registration)
        lives = [each for each in former if each.is_alive and each.roster is not None]
        return known is None and bool(lives) and self.chance.random() < 0.5

    def _hear(self, target: Life, newcomer: Life, tell: Callable[..., None]) -> None:
        """Introduces a newcomer to a worker; a worker that is not running yet answers later."""
        if not target.is_alive or target.error is not None:
            tell(Gone("nobody listens"), None)
        elif target.roster is None:
            target.kept.append(lambda: self._hear(target, newcomer, tell))
        else:
            try:
                if self._answers(target.roster, newcomer.registration):
                    tell(None, DuplicateName("a namesake lives"))
                    return
                if target.roster.arrival(newcomer.registration)[0] is None:
                    target.roster.admit(newcomer, is_introduced=True)
            except Exception as error:
                tell(None, error)
            else:
                tell(None, None)
