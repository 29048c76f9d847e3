"""Fake calls that the test answers, and the other fakes that an ``Execution`` needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchweft.engine.codec.objects import Packed
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.threads.reactor import Waiting
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallCancelled
from torchweft.mapreduce import execution, shared
from torchweft.mapreduce.execution import Execution
from torchweft.mapreduce.partitioners import Part
from torchweft.mapreduce.plan import Manner, Plan
from torchweft.rpc.calls import fail

HEAVY = torch.zeros(1 << 20)
CONTENT = Packed(b"content", (), ())


def make_peer(rank: int, *, is_self: bool = False) -> Peer:
    registration = Registration(f"worker{rank}", rank, ("unix:@x",))
    return Peer(registration, main_by_name=True, is_self=is_self)


def lose(peer: Peer) -> None:
    peer.declare_lost("the test says so")


class FakeReactor:
    """Keeps tasks until the test runs them."""

    def __init__(self) -> None:
        self.tasks: list[Callable[..., None]] = []
        self.waits: list[str] = []
        self.notes: dict[int, Any] = {}
        self.is_closing = False

    def submit_task(self, function: Callable[..., None], first: Any = None) -> None:
        self.tasks.append(function)

    def run_tasks(self) -> None:
        while self.tasks:
            self.tasks.pop(0)(None, None)

    def waiting(self, parts: Callable[[], Any]) -> Waiting:
        return Waiting(self, parts, needs_any=False)  # type: ignore[arg-type]

    def begin_wait(self) -> bool:
        self.waits.append("begin")
        return True

    def end_wait(self) -> None:
        self.waits.append("end")


class FakeFuture(torch.futures.Future[Any]):
    """The answer to a part. Unlike a real future it ends in the thread that cancels it."""

    __slots__ = ("kept", "was_cancelled")

    def __init__(self) -> None:
        torch._C.Future.__init__(self, [])
        self.kept: object = None
        self.was_cancelled = False

    def cancel(self) -> bool:
        self.was_cancelled = True
        if self.done():
            return False
        fail(self, CallCancelled("cancelled"))
        return True


class Sent:
    """A part that was sent: ``number`` is its first argument."""

    def __init__(self, worker: int, args: Sequence[Any], timeout: float) -> None:
        self.worker = worker
        self.number: int = args[0]
        self.timeout = timeout
        self.future = FakeFuture()


class Calls:
    """Replaces ``start`` and ``create``.

    Attributes:
        sent: The parts, in the order in which they were sent.
        made: The workers on which objects were made, each with its parent.
        on_send: Is called while a part is being sent.
        on_make: Is called while an object is being made.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.made: list[tuple[int, int | None]] = []
        self.on_send: Callable[[Sent], None] = lambda sent: None
        self.on_make: Callable[[int], None] = lambda worker: None

    def start(
        self,
        _: Any,
        peer: Peer,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        subject: str | None = None,
    ) -> FakeFuture:
        sent = Sent(peer.id, args[1] if function is shared.run else args, timeout)
        self.on_send(sent)
        self.sent.append(sent)
        return sent.future

    def create(
        self, _: Any, peer: Peer, function: Any, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        self.on_make(peer.id)
        self.made.append((peer.id, args[0].id[0] if function is shared.pull else None))
        return SimpleNamespace(id=(peer.id, 0, 0))

    @property
    def numbers(self) -> list[int]:
        return [sent.number for sent in self.sent]

    def last(self, number: int) -> Sent:
        """Returns the last attempt of a part."""
        return [sent for sent in self.sent if sent.number == number][-1]

    def answer(self, number: int, result: Any = None) -> None:
        """Answers the last attempt of a part, by default with ten times its number."""
        future = self.last(number).future
        if isinstance(result, BaseException):
            fail(future, result)
        else:
            future.set_result(number * 10 if result is None else result)

    def answer_all(self) -> None:
        """Answers all parts sent so far, and all parts sent because of the answers."""
        for sent in self.sent:  # The list grows meanwhile.
            if not sent.future.done():
                self.answer(sent.number)


class Map:
    """One execution on fakes, and its outcome.

    Args:
        patch: Installs the fakes.
        homes: The rank of each part's worker.
        workers: The workers to choose from; by default the workers with parts.
        arguments: The arguments of each part after its number.
        here: The rank of this worker, if it runs parts.
        has_object: Whether the parts share an object.
        how: Fields of the ``Plan``, and of its ``Manner``.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        homes: Sequence[int],
        workers: Sequence[int] = (),
        *,
        arguments: Sequence[Any] = (),
        here: int | None = None,
        has_object: bool = False,
        **how: Any,
    ) -> None:
        workers = tuple(workers or dict.fromkeys(homes))
        self.calls = Calls()
        patch.setattr(execution, "start", self.calls.start)
        patch.setattr(execution, "create", self.calls.create)
        self.reactor = FakeReactor()
        self.peers = {rank: make_peer(rank, is_self=rank == here) for rank in workers}
        self.outcomes: list[tuple[list[Any] | None, BaseException | None]] = []
        others = list(arguments) or [()] * len(homes)
        plan = Plan(
            name="function",
            function=max,
            parts=[Part(home, (), {}) for home in homes],
            arguments=[((number, *other), {}) for number, other in enumerate(others)],
            workers=workers,
            content=CONTENT if has_object else None,
            own_content=CONTENT if has_object else None,
            may_rerun=True,
            manner=Manner(-1.0, balance=False, rerun=None, concurrency=1),
            fan_out=4,
        )
        of_manner = {name: how.pop(name) for name in Manner._fields if name in how}
        self.plan = plan._replace(manner=plan.manner._replace(**of_manner), **how)
        worker: Any = SimpleNamespace(agent=SimpleNamespace(reactor=self.reactor))
        self.execution = Execution(self.plan, self.peers, worker, self.done)

    def done(self, results: list[Any] | None, error: BaseException | None) -> None:
        self.outcomes.append((results, error))

    def begin(self) -> Calls:
        self.execution.begin()
        return self.calls

    @property
    def results(self) -> list[Any]:
        """The results; fails unless it ended exactly once, without an error."""
        ((results, error),) = self.outcomes
        assert error is None
        assert results is not None
        return results

    @property
    def error(self) -> BaseException:
        """The error; fails unless it ended exactly once, with an error."""
        ((results, error),) = self.outcomes
        assert results is None
        assert error is not None
        return error
