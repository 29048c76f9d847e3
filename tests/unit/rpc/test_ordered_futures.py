from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fake_cuda import FakeCuda, FakeTensor, fake_cuda
from torchweft.rpc.calls import Future, OrderedFuture

LIMIT_S = 20.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


def complete_elsewhere(cuda: FakeCuda, future: OrderedFuture[Any]) -> FakeTensor:
    """Completes a future on another thread, with a value of that thread's own stream."""
    made: list[FakeTensor] = []

    def run() -> None:
        cuda.set_stream(cuda.new_stream(0))
        made.append(cuda.compute())
        future.set_result([made[0]])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return made[0]


READERS: list[Callable[[OrderedFuture[Any]], Any]] = [OrderedFuture.wait, OrderedFuture.value]


@pytest.mark.parametrize("is_on_before", [True, False])
@pytest.mark.parametrize("read", READERS)
def test_who_reads_a_result_comes_after_it(
    cuda: FakeCuda, read: Callable[[OrderedFuture[Any]], Any], is_on_before: bool
) -> None:
    cuda.is_on = is_on_before
    future: OrderedFuture[Any] = OrderedFuture()
    cuda.is_on = True
    value = complete_elsewhere(cuda, future)
    assert not cuda.is_ordered(value)
    assert read(future) == [value]
    assert cuda.is_ordered(value)
    assert cuda.current_stream(0).number in value.kept_for


@pytest.mark.parametrize("is_on_before", [True, False])
def test_who_reads_what_a_callback_has_made_comes_after_it(
    cuda: FakeCuda, is_on_before: bool
) -> None:
    cuda.is_on = is_on_before
    future: OrderedFuture[Any] = OrderedFuture()
    ordered: list[bool] = []

    def callback(done: Any) -> list[FakeTensor]:
        (value,) = done.value()
        ordered.append(cuda.is_ordered(value))
        return [cuda.compute()]

    child = future.then(callback)
    grandchild = child.then(lambda done: done.wait())
    cuda.is_on = True
    complete_elsewhere(cuda, future)
    (value,) = grandchild.wait()
    assert ordered == [True]
    assert cuda.is_ordered(value)
    # Readers by PyTorch's own functions get a complete result.
    assert bool(cuda.synchronized) is not is_on_before


class Awaited:
    """Awaits a future as that of a call is awaited."""

    def __init__(self, future: OrderedFuture[Any]) -> None:
        self.future = future

    def __await__(self) -> Any:
        return Future.__await__(self.future)  # type: ignore[arg-type]


def test_a_coroutine_comes_after_what_it_awaits(cuda: FakeCuda) -> None:
    async def run() -> None:
        future: OrderedFuture[Any] = OrderedFuture()
        loop = asyncio.get_running_loop()
        finished = loop.run_in_executor(None, functools.partial(complete_elsewhere, cuda, future))
        found = await Awaited(future)
        value = await finished
        assert found == [value]
        assert cuda.is_ordered(value)

    asyncio.run(run())
