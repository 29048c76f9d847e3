"""Cancelling: queued calls never begin, running functions are told, nested calls end too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import remains
from tests.contract.processes import functions, timing
from tests.contract.processes.functions import LIMIT_S, raised_by, wait_until
from torchweft import rpc
from torchweft.errors import CallCancelled, CallTimeout
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(autouse=True)
def nothing_stays(group: Cluster) -> Iterator[None]:
    """Checks that no worker remembers a call that has ended."""
    yield
    for name in group.names:
        wait_until(
            lambda name=name: rpc.rpc_sync(name, remains.open_calls) == 0,  # type: ignore[misc]
            lambda name=name: f"{name} still knows calls",  # type: ignore[misc]
        )


def noted(worker: str, name: str, count: int) -> list[Any]:
    """Waits until a worker has ``count`` notes, and returns them."""
    wait_until(
        lambda: len(rpc.rpc_sync(worker, timing.noted, args=(name,))) >= count,
        lambda: f"{rpc.rpc_sync(worker, timing.noted, args=(name,))} is noted as {name!r}",
    )
    return rpc.rpc_sync(worker, timing.noted, args=(name,))


def start(worker: str, function: Callable[..., Any], *args: Any) -> rpc.Future[Any]:
    return rpc.rpc_async(worker, function, args=args, timeout=0)


@pytest.mark.parametrize("ending", ["cancelled", "timed out"])
def test_what_runs_may_ask(group: Cluster, ending: str) -> None:
    name = f"runs, {ending}"
    limit_s = 0 if ending == "cancelled" else 0.5
    future = rpc.rpc_async("worker0", timing.until_cancelled, args=(name,), timeout=limit_s)
    assert noted("worker0", name, 1)[0] == "begins"
    if ending == "cancelled":
        assert future.cancel()
    assert noted("worker0", name, 2) == ["begins", "ends"]
    assert isinstance(raised_by(future.wait), (CallCancelled, CallTimeout))


def test_a_coroutine_is_cancelled(group: Cluster) -> None:
    future = start("worker0", timing.sleep_until_cancelled, "coroutine")
    noted("worker0", "coroutine", 1)
    assert future.cancel()
    assert noted("worker0", "coroutine", 2) == ["begins", "cancelled"]


@pytest.mark.parametrize(
    "function",
    [
        timing.until_nested_is_cancelled,
        timing.await_until_cancelled,
        timing.continue_until_cancelled,
    ],
)
def test_what_was_called_in_turn_ends(group: Cluster, function: Callable[..., Any]) -> None:
    name = function.__name__
    future = start("worker0", function, "worker1", name)
    noted("worker1", name, 1)
    assert future.cancel()
    assert noted("worker1", name, 2)[1] in ("ends", "cancelled")
    if function is timing.until_nested_is_cancelled:
        (error,) = noted("worker0", name, 1)
        assert isinstance(error, CallCancelled)
        assert "called for worker 'driver'" in str(error)
    elif function is timing.continue_until_cancelled:
        assert noted("worker0", name, 1) == [True]
        refused = noted("worker0", name + " refused", 3)
        assert {type(error) for error in refused} == {CallCancelled}


def test_a_cancelled_function_can_put_things_in_order(group: Cluster) -> None:
    future = start("worker0", timing.cleanup_when_cancelled, "worker1", "order")
    noted("worker0", "order", 1)
    assert future.cancel()
    assert noted("worker1", "order", 1) == ["cleaned up"]


def test_a_task_that_is_cancelled_cancels_what_it_awaits(group: Cluster) -> None:
    async def give_up() -> None:
        call = start("worker0", timing.sleep_until_cancelled, "awaited")
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(noted, "worker0", "awaited", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert isinstance(raised_by(call.wait), CallCancelled)

    asyncio.run(give_up())
    assert noted("worker0", "awaited", 2) == ["begins", "cancelled"]


def test_a_call_may_end_after_the_event_loop_in_which_it_is_awaited(
    group: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    call = start("worker0", functions.pass_gate, "closed loop", 1)

    async def begin() -> Any:
        waiting = call.__await__()
        next(waiting)
        return waiting

    loop = asyncio.new_event_loop()
    waiting = loop.run_until_complete(begin())
    loop.close()
    rpc.rpc_sync("worker0", functions.open_gate, args=("closed loop",))
    assert call.wait() == 1
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    assert ended.wait(LIMIT_S)
    assert "Event loop is closed" not in capfd.readouterr().err
    waiting.close()


def test_cancelling_what_has_ended_does_nothing(group: Cluster) -> None:
    future = rpc.rpc_async("worker0", functions.add, args=(1, 2))
    assert future.wait() == 3
    assert not future.cancel()
    assert future.wait() == 3


def test_cancelling_among_many_hits_the_right_ones(group: Cluster) -> None:
    futures = [start("worker0", functions.pass_gate, "many", number) for number in range(50)]
    assert all(future.cancel() for future in futures[::2])
    rpc.rpc_sync("worker0", functions.open_gate, args=("many",))
    assert [future.wait() for future in futures[1::2]] == list(range(1, 50, 2))
    for future in futures[::2]:
        assert isinstance(raised_by(future.wait), CallCancelled)


def test_a_call_to_oneself_is_cancelled_like_any_other(group: Cluster) -> None:
    future = start("driver", timing.sleep_until_cancelled, "own")
    wait_until(lambda: timing.noted("own") == ["begins"], lambda: "it does not begin")
    assert future.cancel()
    wait_until(lambda: timing.noted("own") == ["begins", "cancelled"], lambda: "it is not told")
