from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.mapreduce.fake_calls import FakeReactor
from torchweft.errors import CallCancelled
from torchweft.mapreduce import execution
from torchweft.mapreduce.execution import MapFuture

LIMIT_S = 20.0


class NotifyingReactor(FakeReactor):
    """Tells when a thread is about to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.has_waiter = threading.Event()

    def begin_wait(self) -> bool:
        self.has_waiter.set()
        return super().begin_wait()


def make() -> tuple[MapFuture[Any], NotifyingReactor]:
    reactor: Any = NotifyingReactor()
    return MapFuture(reactor), reactor


def while_waiting(
    future: MapFuture[Any], reactor: NotifyingReactor, then: Callable[[], Any]
) -> Any:
    """Calls ``then`` while another thread is in ``wait``; returns the result of ``wait``."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(future.wait)
        assert reactor.has_waiter.wait(LIMIT_S)
        then()
        return waiting.result(LIMIT_S)


def test_who_waits_gets_the_result() -> None:
    future, reactor = make()
    assert while_waiting(future, reactor, lambda: future.complete(5)) == 5
    assert reactor.waits == ["begin", "end"], "others may use the thread meanwhile"
    assert future.wait() == 5
    assert reactor.waits == ["begin", "end"]


def test_who_waits_gets_a_copy_of_the_error() -> None:
    future, reactor = make()
    error = KeyError("missing")
    caught = []
    for _ in range(2):
        with pytest.raises(KeyError, match="missing") as raised:
            while_waiting(future, reactor, lambda: future.done() or future.fail(error))
        caught.append(raised.value)
    assert len({id(each) for each in (error, *caught)}) == 3


def test_who_waits_does_not_wait_for_callbacks() -> None:
    future, reactor = make()
    was_told = threading.Event()
    seen = []
    future.add_done_callback(lambda done: seen.append(was_told.wait(LIMIT_S)))

    def wait() -> int:
        result: int = future.wait()
        was_told.set()
        return result

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert reactor.has_waiter.wait(LIMIT_S)
        future.complete(5)
        assert waiting.result(LIMIT_S) == 5
    assert seen == [True]


def test_a_map_of_a_worker_that_has_shut_down_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_LOOK_S", 0.001)
    future, reactor = make()

    def give_up() -> bool:
        future.fail(CallCancelled("shut down"))
        return True

    future.can_cancel(give_up)
    with pytest.raises(CallCancelled, match="shut down"):
        while_waiting(future, reactor, lambda: setattr(reactor, "is_closing", True))
    assert reactor.waits == ["begin", "end"]


def test_a_map_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_LOOK_S", 0.0)
    future, reactor = make()
    future.can_cancel(lambda: pytest.fail("nobody has shut down"))
    assert while_waiting(future, reactor, lambda: future.complete(5)) == 5


def test_it_goes_on_as_those_of_torch_do() -> None:
    first, second = make()[0], make()[0]
    doubled = first.then(lambda done: done.wait() * 2)
    both = torch.futures.collect_all([first, second])
    first.complete(2)
    second.complete(3)
    assert doubled.wait() == 4
    assert [each.wait() for each in both.wait()] == [2, 3]


def test_it_can_be_awaited() -> None:
    async def both() -> Any:
        good, bad = make()[0], make()[0]
        loop = asyncio.get_running_loop()
        loop.call_soon(good.complete, 5)
        loop.call_soon(bad.fail, KeyError("missing"))
        with pytest.raises(KeyError):
            await bad
        return await good

    assert asyncio.run(both()) == 5


def test_who_no_longer_awaits_it_cancels_it() -> None:
    async def give_up() -> list[str]:
        future, _ = make()
        given_up: list[str] = []

        def on_cancel() -> bool:
            given_up.append("the map")
            return True

        future.can_cancel(on_cancel)
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        future.complete(None)
        return given_up

    assert asyncio.run(give_up()) == ["the map"]


def test_cancelling() -> None:
    future, _ = make()
    assert not future.cancel(), "there is nothing to give up yet"
    future.can_cancel(lambda: True)
    assert future.cancel()
    future.fail(CallCancelled(""))
    assert not future.cancel()


@pytest.mark.parametrize("end", [lambda future: future.complete(1), lambda f: f.fail(KeyError())])
def test_what_has_ended_is_not_kept(end: Callable[[MapFuture[Any]], None]) -> None:
    class Execution:
        def __init__(self, future: MapFuture[Any]) -> None:
            self.future = future

        def cancel(self) -> bool:
            return True

    future, _ = make()
    execution = Execution(future)
    future.can_cancel(execution.cancel)
    end(future)
    kept = weakref.ref(execution)
    del execution
    assert kept() is None, "no collector looks into futures"
