from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from torchweft.engine.worker.calls import PendingCall
from torchweft.rpc.calls import Future


class Agent:
    """Stands in for a worker and its agent: notes the calls that are cancelled."""

    future: Future[Any]

    def __init__(self) -> None:
        self.cancelled: list[BaseException] = []

    @property
    def agent(self) -> Agent:
        """Serves as its own agent."""
        return self

    @property
    def calls(self) -> Agent:
        """Serves as its own table of open calls."""
        return self

    def cancel(self, call: PendingCall, error: BaseException) -> bool:
        self.cancelled.append(error)
        self.future.set_exception(error)  # type: ignore[arg-type]
        return True


def new_future() -> tuple[Future[Any], Agent]:
    agent = Agent()
    call = PendingCall(1, "callee", "function", math.inf)
    agent.future = Future(agent, call)  # type: ignore[arg-type]
    return agent.future, agent


async def await_with_error(error: Any, *, is_early: bool) -> Any:
    future, _ = new_future()
    if is_early:
        future.set_exception(error)
        return await future
    thread = threading.Thread(target=future.set_exception, args=(error,))
    asyncio.get_running_loop().call_soon(thread.start)
    try:
        return await future
    finally:
        thread.join()


@pytest.mark.parametrize("is_early", [False, True])
def test_the_end_of_a_remote_iterator_does_not_hang_who_awaits_it(is_early: bool) -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(await_with_error(StopIteration(3), is_early=is_early))
    assert isinstance(caught.value.__cause__, StopIteration)
