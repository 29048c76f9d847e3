from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch

from torchweft.engine.worker.calls import PendingCall
from torchweft.errors import CallCancelled
from torchweft.rpc.calls import Future


class Agent:
    """Stands in for a worker and its agent: completes a future when a thread waits for it."""

    future: Future[Any]

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.waited: list[PendingCall] = []
        self.cancelled: list[BaseException] = []

    @property
    def agent(self) -> Agent:
        """Serves as its own agent."""
        return self

    @property
    def calls(self) -> Agent:
        """Serves as its own table of open calls."""
        return self

    def wait(self, call: PendingCall, *, may_complete: bool) -> None:
        self.waited.append(call)
        complete(self.future, self.outcome)

    def cancel(self, call: PendingCall, error: BaseException) -> bool:
        if self.future.done():
            return False
        self.cancelled.append(error)
        self.future.set_exception(error)  # type: ignore[arg-type]
        return True


def complete(future: Future[Any], outcome: Any) -> None:
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)  # type: ignore[arg-type]
    else:
        future.set_result(outcome)


def new_future(outcome: Any = None) -> tuple[Future[Any], Agent]:
    agent = Agent(outcome)
    call = PendingCall(1, "callee", "function", math.inf)
    agent.future = Future(agent, call)  # type: ignore[arg-type]
    return agent.future, agent


def test_who_waits_has_the_agent_read_the_answer() -> None:
    future, agent = new_future(5)
    assert future.wait() == 5
    assert agent.waited == [future._call]
    assert future.wait() == 5
    assert len(agent.waited) == 1


def test_who_waits_gets_the_error() -> None:
    future, _ = new_future(KeyError("missing"))
    with pytest.raises(KeyError, match="missing"):
        future.wait()


def test_it_works_with_those_of_torch() -> None:
    futures = [new_future()[0] for _ in range(3)]
    doubled = [future.then(lambda done: done.value() * 2) for future in futures]
    collected = torch.futures.collect_all(futures)
    for number, future in enumerate(futures):
        future.set_result(number)
    assert torch.futures.wait_all(doubled) == [0, 2, 4]
    assert [future.value() for future in collected.wait()] == [0, 1, 2]


def test_cancelling_fails_it_with_the_name_of_the_worker() -> None:
    future, _ = new_future()
    assert future.cancel()
    assert not future.cancel()
    with pytest.raises(CallCancelled) as caught:
        future.wait()
    assert caught.value.worker == "callee"


async def await_with_outcome(outcome: Any, *, is_early: bool) -> Any:
    future, _ = new_future()
    if is_early:
        complete(future, outcome)
        return await future
    thread = threading.Thread(target=complete, args=(future, outcome))
    asyncio.get_running_loop().call_soon(thread.start)
    try:
        return await future
    finally:
        thread.join()


@pytest.mark.parametrize("is_early", [False, True])
def test_awaiting_gives_the_result(is_early: bool) -> None:
    assert asyncio.run(await_with_outcome("result", is_early=is_early)) == "result"


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("error", [ValueError("wrong"), asyncio.CancelledError("remote")])
def test_awaiting_raises_the_error(error: BaseException, is_early: bool) -> None:
    with pytest.raises(type(error)):
        asyncio.run(await_with_outcome(error, is_early=is_early))


@pytest.mark.parametrize("is_early", [False, True])
def test_the_end_of_a_remote_iterator_does_not_hang_who_awaits_it(is_early: bool) -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(await_with_outcome(StopIteration(3), is_early=is_early))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_who_gives_up_awaiting_cancels_the_call() -> None:
    future, agent = new_future()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.001)

    asyncio.run(give_up())
    assert [type(error) for error in agent.cancelled] == [CallCancelled]
    with pytest.raises(CallCancelled):
        future.wait()


def test_a_shield_keeps_the_call_from_being_cancelled() -> None:
    future, agent = new_future()

    async def give_up() -> int:
        waiting = asyncio.ensure_future(future)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.001)
        future.set_result(1)
        return await waiting

    assert asyncio.run(give_up()) == 1
    assert agent.cancelled == []


def test_many_coroutines_await_one_future() -> None:
    async def gather() -> list[Any]:
        future, _ = new_future()
        asyncio.get_running_loop().call_soon(future.set_result, 4)

        async def wait() -> Any:
            return await future

        return await asyncio.gather(*[wait() for _ in range(5)])

    assert asyncio.run(gather()) == [4] * 5
