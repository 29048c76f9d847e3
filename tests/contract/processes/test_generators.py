"""``rpc.stream``: values of remote generators, and their end for every reason."""

from __future__ import annotations

import gc

import pytest
import torch

from tests import remains
from tests.contract.processes import generator_functions as functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.generator_functions import Counter
from torchweft import autograd, rpc
from torchweft.errors import ArgumentTypeError, CallTimeout, ConfigurationError, MethodNotFound
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> None:
    rpc.rpc_sync("worker0", functions.forget)


def seen() -> list[object]:
    return rpc.rpc_sync("worker0", functions.seen)


def await_seen(what: object) -> None:
    wait_until(lambda: what in seen(), lambda: f"{what!r} is not in {seen()}")


def test_values_come_in_order_and_end() -> None:
    assert list(rpc.stream("worker0", functions.count_to, (20,))) == list(range(20))
    assert list(rpc.stream("worker0", functions.count_to, (0,))) == []
    assert list(rpc.stream("driver", functions.count_on, (5,), ahead=1)) == list(range(5))
    assert list(rpc.stream("worker0", functions.is_open, ("worker1",))) == [0, 1, 2]
    assert list(rpc.stream("worker0", range, (4,), ahead=100)) == [0, 1, 2, 3]


def test_a_generator_is_no_further_ahead_than_it_may_be() -> None:
    numbers = rpc.stream("worker0", functions.count_to, (100,), ahead=3)
    await_seen(2)
    assert next(numbers) == 0
    await_seen(3)
    # The calls of this worker are served in order, so the generator would have gone on by now.
    assert rpc.rpc_sync("worker0", functions.seen) == [0, 1, 2, 3]
    assert "open" in repr(numbers)
    numbers.close()
    await_seen("closed")
    assert list(numbers) == []
    assert "ended" in repr(numbers)
    assert seen() == [0, 1, 2, 3, "closed"]


def test_a_stream_that_was_given_up_does_not_begin() -> None:
    before = rpc.rpc_sync("worker0", remains.open_streams)
    with pytest.raises(CallTimeout):
        rpc.stream("worker0", functions.Late, timeout=0.2)
    await_seen("called")
    rpc.rpc_sync("worker0", functions.go_on)
    await_seen("iterated")
    assert rpc.rpc_sync("worker0", remains.open_streams) <= before


def test_values_of_several_streams_as_they_come() -> None:
    held = rpc.stream("worker0", functions.wait_before, (100,), ahead=2)
    free = rpc.stream("worker1", functions.count_on, (6,), ahead=2)
    with rpc.merged([held, free]) as found:
        # The one that is held keeps no value of the other waiting.
        taken = [next(found) for _ in range(7)]
        assert [value for stream, value in taken if stream is free] == list(range(6))
        assert [value for stream, value in taken if stream is held] == [100]
        rpc.rpc_sync("worker0", functions.go_on)
        assert list(found) == [(held, 101)]


def test_merged_streams_are_no_further_ahead_than_they_may_be() -> None:
    numbers = rpc.stream("worker0", functions.count_to, (100,), ahead=2)
    with rpc.merged([numbers, rpc.stream("worker1", functions.count_on, (0,))]) as found:
        assert next(found) == (numbers, 0)
        await_seen(2)
        assert seen() == [0, 1, 2]
    await_seen("closed")


def test_a_stream_that_is_dropped_is_closed() -> None:
    numbers = rpc.stream("worker0", functions.count_to, (100,))
    assert next(numbers) == 0
    del numbers
    gc.collect()
    await_seen("closed")


def test_a_generator_that_computes_may_ask_whether_it_is_wanted() -> None:
    with rpc.stream("worker0", functions.until_cancelled) as numbers:
        assert next(numbers) == 0
        await_seen("computes")  # Ended before that, it would not be asked for a second value.
    await_seen("noticed")


def test_an_error_comes_at_its_place_and_ends_the_stream() -> None:
    numbers = rpc.stream("worker0", functions.fail_after, (3,))
    assert [next(numbers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="no more"):
        next(numbers)
    assert list(numbers) == []


def test_a_value_that_is_late_may_come_later() -> None:
    with rpc.stream("worker0", functions.wait_before, (7,), timeout=0.05) as numbers:
        assert next(numbers) == 7
        with pytest.raises(CallTimeout, match="of wait_before on worker 'worker0' had no value"):
            next(numbers)
        rpc.rpc_sync("worker0", functions.go_on)
        found: list[int] = []
        wait_until(lambda: bool(found or _next(numbers, found)), lambda: "no value")
        assert found == [8]


def _next(numbers: rpc.Stream[int], found: list[int]) -> bool:
    try:
        found.append(next(numbers))
    except CallTimeout:
        return False
    return True


def test_modes_of_a_generator_last() -> None:
    assert list(rpc.stream("worker0", functions.without_gradients, (3,))) == [False] * 3
    assert list(rpc.stream("worker0", functions.count_on, (1,))) == [0]


def test_large_tensors() -> None:
    found = [each[-1].item() for each in rpc.stream("worker0", functions.large, (6,), ahead=2)]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_gradients_flow_through_the_values_of_a_stream() -> None:
    leaves = [torch.full((2,), float(n), dtype=torch.float64, requires_grad=True) for n in (1, 2)]
    with autograd.context() as context_id:
        values = list(rpc.stream("worker0", functions.scaled, (leaves,)))
        autograd.backward(context_id, [sum(values).square().sum()])  # type: ignore[union-attr]
        found = autograd.get_gradients(context_id)
        expected = torch.tensor([2.0, 3.0], dtype=torch.float64) ** 2 * 6
        for leaf in leaves:
            torch.testing.assert_close(found[leaf], expected, rtol=0, atol=1e-12)


def test_methods_of_a_referenced_value() -> None:
    counter = rpc.remote("worker0", Counter, (10,), {"step": 5})
    assert list(rpc.stream(counter, Counter.values, (3,))) == [15, 20, 25]
    with pytest.raises(MethodNotFound):
        rpc.stream(counter, functions.Unrelated.missing)


def test_mistakes() -> None:
    with pytest.raises(ConfigurationError, match="ahead=0: pass a number from 1 to 4096"):
        rpc.stream("worker0", functions.count_on, (1,), ahead=0)
    with pytest.raises(ArgumentTypeError, match=r"not_iterable returned.*cannot be iterated over"):
        rpc.stream("worker0", functions.not_iterable)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="returned a coroutine, which cannot be iterated"):
        rpc.stream(rpc.get_worker_info(), functions.unawaited)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="taken apart row by row"):
        rpc.stream("worker0", torch.ones, (5,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="end"):
        rpc.stream("worker0", functions.count_on)
