"""Calls, callers and requests for the state machines of calls, without a thread or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torchweft.engine.protocol.calls import AnsweredCall, OpenCall, ServedCall
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind


@dataclass(eq=False)
class Peer:
    """A caller as its callee sees it."""

    name: str = "caller"
    served: dict[int, ServedCall] = field(default_factory=dict)
    lost: BaseException | None = None


class Asked(OpenCall):
    """A call that nobody waits for."""

    def __init__(
        self,
        worker: int = 1,
        timeout_s: float = math.inf,
        started_s: float = 0.0,
        parent: ServedCall | None = None,
    ) -> None:
        self.worker = worker
        self.worker_name = f"worker{worker}"
        self.function = "module:function"
        self.timeout_s = timeout_s
        self.started_s = started_s
        self.deadline_s = started_s + timeout_s
        self.parent = parent
        self.number = 0
        self.frame = None
        self.error = None
        self.on_done = None


class Served(AnsweredCall):
    """A call that records its answers and its value."""

    def __init__(self, peer: Peer, number: int = 7, arrived_s: float = 10.0) -> None:
        super().__init__(peer, request(number), arrived_s)
        self.context_id = 0
        self.owned = None
        self.worker = self
        self.unfinished: set[AnsweredCall] = set()
        self.watchers: tuple[Any, ...] = ()
        self.told: list[Any] = []
        self.failure: BaseException | None = None
        self.is_wanted = self.is_referred = True

    def reply(self, peer: Any, number: int, result: Any, context_id: int) -> None:
        if self.failure is not None:
            raise self.failure
        assert peer.served.get(number) is self, "it is open until it has been answered"
        self.told.append((number, result))

    def reply_error(self, peer: Any, number: int, error: BaseException) -> None:
        self.reply(peer, number, error, 0)

    def create(self, creation: int) -> int | None:
        return creation if self.is_wanted else None

    def keep(self, result: Any, error: BaseException | None) -> None:
        if self.failure is not None:
            raise self.failure
        self.told.append((f"value {self.owned}", result or error))

    def not_delivered(self, failure: BaseException) -> BaseException:
        self.failure = None
        return ValueError(f"instead of {failure!r}")

    def failed_late(self) -> None:
        self.told.append("late")

    def is_referred_to(self) -> bool:
        return self.is_referred


def has_outcome(call: OpenCall) -> bool:
    return call.frame is not None or call.error is not None


def request(number: int) -> Frame:
    return Frame(Kind.CALL, 0, number, b"", ())


def answer(number: int) -> Frame:
    return Frame(Kind.REPLY, 0, number, b"", ())
