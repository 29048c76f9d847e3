"""Fake calls that the test answers, and the other fakes that an ``Execution`` needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchweft import extending, rpc
from torchweft.autograd.contexts import current_id
from torchweft.engine.codec.objects import Packed
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallCancelled
from torchweft.extending import Member
from torchweft.ids import WorkerInfo
from torchweft.mapreduce import shared
from torchweft.mapreduce.execution import Execution
from torchweft.mapreduce.partitioners import Part
from torchweft.mapreduce.plan import Manner, Plan
from torchweft.rpc import OrderedFuture

HEAVY = torch.zeros(1 << 20)
CONTENT = Packed(b"content", [], [])


def make_peer(rank: int, *, is_self: bool = False) -> Peer:
    registration = Registration(f"worker{rank}", rank, ("unix:@x",))
    return Peer(registration, main_by_name=True, is_self=is_self)


def lose(peer: Peer) -> None:
    peer.declare_lost("the test says so")


class Tasks:
    """Keeps what is to run in the background until the test runs it."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def add(self, function: Callable[..., None], *args: Any) -> None:
        self.tasks.append(partial(function, *args))

    def run_all(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class FakeFuture(OrderedFuture[Any]):
    """The answer to a part. Unlike a real future it ends in the thread that cancels it."""

    __slots__ = ("kept", "was_cancelled")

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.was_cancelled = False

    def cancel(self) -> bool:
        self.was_cancelled = True
        if self.done():
            return False
        self.set_exception(CallCancelled("cancelled"))
        return True


class Sent:
    """A part that was sent: ``number`` is its first argument."""

    def __init__(self, worker: int, args: Sequence[Any], timeout: float) -> None:
        self.worker = worker
        self.number: int = args[0]
        self.timeout = timeout
        self.future = FakeFuture()


class Calls:
    """Replaces ``start_call`` and ``remote``.

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

    def start_call(
        self,
        to: Member,
        function: Any,
        args: Any,
        kwargs: Any = None,
        *,
        timeout: float,
        name: str,
    ) -> FakeFuture:
        if to.lost is not None:
            raise to.lost_error()
        has_object = function is shared.run
        sent = Sent(to.id, args[1] if has_object else args, timeout)
        self.on_send(sent)
        self.sent.append(sent)
        return sent.future

    def remote(self, to: WorkerInfo, function: Any, args: Any) -> Any:
        self.on_make(to.id)
        self.made.append((to.id, args[0].worker if function is shared.pull else None))
        return SimpleNamespace(worker=to.id, id=(to.id, 0, 0))

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
            future.set_exception(result)
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
        self.tasks = Tasks()
        patch.setattr(extending, "start_call", self.calls.start_call)
        patch.setattr(rpc, "remote", self.calls.remote)
        patch.setattr(extending, "run_in_background", self.tasks.add)
        patch.setattr(extending, "is_worker", lambda: self.is_worker)
        self.is_worker = True
        self.peers = {rank: make_peer(rank, is_self=rank == here) for rank in workers}
        self.outcomes: list[tuple[list[Any] | None, BaseException | None]] = []
        others = list(arguments) or [()] * len(homes)
        manner = Manner(-1.0, balance=False, rerun=None, concurrency=1)
        of_manner = {name: how.pop(name) for name in Manner._fields if name in how}
        self.plan = Plan.__new__(Plan)
        vars(self.plan).update(
            name="function",
            function=max,
            parts=[Part(home, (), {}) for home in homes],
            arguments=[((number, *other), {}) for number, other in enumerate(others)],
            workers=workers,
            members=self.peers,
            content=CONTENT if has_object else None,
            own_content=CONTENT if has_object else None,
            may_rerun=True,
            manner=manner._replace(**of_manner),
            fan_out=4,
            is_async=False,
            context_id=current_id() if torch.is_grad_enabled() else 0,
        )
        vars(self.plan).update(how)
        self.execution = Execution(self.plan, self.done)

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
