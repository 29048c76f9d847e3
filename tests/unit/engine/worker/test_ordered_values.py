"""Values that go from thread to thread, on a fake GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_cuda import FakeCuda, FakeTensor, fake_cuda
from torchweft.engine.threads.device_streams import ServedStreams, use
from torchweft.engine.worker.references import OwnedValue
from torchweft.rpc.coroutines import CoroutineRunner
from torchweft.rpc.sources import Source

LIMIT_S = 20.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


def elsewhere(cuda: FakeCuda, function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        cuda.set_stream(cuda.new_stream(0))
        found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return found[0]


def test_an_owned_value_has_a_mark_of_the_thread_that_makes_it(cuda: FakeCuda) -> None:
    owned = OwnedValue()

    def make() -> FakeTensor:
        value = cuda.compute()
        owned.resolve({"weights": value})
        return value

    value = elsewhere(cuda, make)
    assert not cuda.is_ordered(value)
    use(owned.mark, owned.value)
    assert cuda.is_ordered(value)
    assert cuda.current_stream(0).number in value.kept_for


def test_an_owned_value_is_ready_only_when_it_can_be_read(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers take no lock: a value was read as None while its mark was being made."""
    owned = OwnedValue()
    found = []

    def record(stream: Any, event: Any = None) -> Any:
        found.append(owned.is_ready)
        return type(cuda).record(cuda, stream, event)

    monkeypatch.setattr(cuda, "record", record)
    owned.resolve(1)
    assert found
    assert not any(found)
    assert owned.is_ready


def test_a_coroutine_comes_after_its_arguments_and_before_later_tasks(cuda: FakeCuda) -> None:
    streams = ServedStreams()
    runner = CoroutineRunner("test", streams)
    outcome: list[Any] = []
    ended = threading.Event()

    async def double(values: list[FakeTensor]) -> tuple[bool, bool, FakeTensor]:
        await asyncio.sleep(0)
        (value,) = values
        is_kept = cuda.current_stream(0).number in value.kept_for
        return cuda.is_ordered(value), is_kept, cuda.compute()

    def note(result: Any, error: BaseException | None) -> None:
        outcome.append((result, error))
        ended.set()

    def call() -> None:
        runner.run(double([cuda.compute()]), 0, note)

    elsewhere(cuda, call)
    assert ended.wait(LIMIT_S)
    ((result, error),) = outcome
    assert error is None
    is_ordered, is_kept, made = result
    assert (is_ordered, is_kept) == (True, True)
    assert made.stream is not cuda.default_stream(0)
    begun = streams.begin()
    assert cuda.is_ordered(made)
    streams.end(begun)
    runner.close(LIMIT_S)


class Call:
    """Stands in for a served call."""

    context_id = 0
    worker = SimpleNamespace(carrier=None, watchers=())

    def __init__(self) -> None:
        self.result: Any = None
        self.ended = threading.Event()

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.result = result, error
        self.ended.set()

    def on_cancel(self, stop: Callable[[Any], object]) -> None:
        pass


def test_a_generator_comes_after_its_arguments_and_before_later_tasks(cuda: FakeCuda) -> None:
    streams = ServedStreams()

    def values(first: FakeTensor) -> Iterator[Any]:
        yield cuda.is_ordered(first), cuda.current_stream(0).number in first.kept_for
        yield cuda.compute()

    source = elsewhere(cuda, lambda: Source("test", values(cuda.compute()), streams))
    source.start()
    first, second = Call(), Call()
    source.pull(0, first)
    source.pull(1, second)
    assert second.ended.wait(LIMIT_S)
    assert first.result == (((True, True),), None)
    source.stop()
    source.join(LIMIT_S)
    ((made,), error) = second.result
    assert error is None
    assert made.stream is not cuda.default_stream(0)
    begun = streams.begin()
    assert cuda.is_ordered(made)
    streams.end(begun)
