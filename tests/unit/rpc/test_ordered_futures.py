from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fake_cuda import FakeCuda, FakeTensor, fake_cuda
from torchweft.errors import SerializationError
from torchweft.rpc.api import RRef
from torchweft.rpc.calls import Future, Hidden, OrderedFuture, fail, is_shown

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


def test_an_error_of_a_callback_is_that_of_its_future(cuda: FakeCuda) -> None:
    future: OrderedFuture[int] = OrderedFuture()
    child = future.then(lambda done: {}["missing"])
    future.set_result(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="running the callback: KeyError: 'missing'") as told:
            child.wait()
        assert isinstance(told.value.__cause__, KeyError)


class Unpicklable:
    """Refuses to be pickled, as generators do."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize("content", [Unpicklable(), [lambda: 1], [FakeTensor]])
def test_results_that_cannot_be_pickled_arrive(cuda: FakeCuda, content: Any) -> None:
    future: OrderedFuture[Any] = OrderedFuture()
    child = future.then(lambda done: done.wait())
    future.set_result(content)
    assert future.wait() is content
    assert future.value() is content
    assert child.wait() is content


class StrangeError(Exception):
    """An error with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("strange")
        self.lock = threading.local()


def test_errors_that_cannot_be_pickled_arrive(cuda: FakeCuda) -> None:
    future: OrderedFuture[Any] = OrderedFuture()
    fail(future, StrangeError())
    with pytest.raises(StrangeError, match="strange"):
        future.wait()


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


def test_pytorchs_own_functions_read_what_they_can_take(cuda: FakeCuda) -> None:
    futures: list[OrderedFuture[Any]] = [OrderedFuture() for _ in range(3)]
    collected = torch.futures.collect_all(list(futures))
    contents: list[Any] = [torch.ones(2), (1, {"a": [torch.zeros(1), None]}), RRef.__new__(RRef)]
    for future, content in zip(futures, contents, strict=True):
        future.set_result(content)
    found = [each.wait() for each in collected.wait()]
    assert all(each is content for each, content in zip(found, contents, strict=True))


# What PyTorch can take


def test_pytorch_finds_no_tensor_in_a_hidden_result() -> None:
    extract: Any = torch._jit_internal._extract_tensors
    assert extract([Hidden(torch.ones(1)), torch.ones(2)])[0].numel() == 2
    assert "type int" in repr(Hidden(3))


def test_pytorch_finds_no_tensor_in_a_reference_and_pickle_refuses_it() -> None:
    reference: Any = RRef.__new__(RRef)
    extract: Any = torch._jit_internal._extract_tensors
    assert extract([reference, (reference,)]) == []
    with pytest.raises(SerializationError):
        pickle.dumps(reference)


class Holder:
    """An object of the program with a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, True),
        (torch.ones(1), True),
        ({"a": [1, torch.ones(1)]}, True),
        (Holder(), True),
        (Unpicklable(), False),
        ([Unpicklable()], False),
    ],
)
def test_which_results_pytorch_can_take(value: Any, expected: bool) -> None:
    assert is_shown(value, (0,)) is expected
