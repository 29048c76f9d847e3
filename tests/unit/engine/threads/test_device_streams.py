from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda import FakeCuda, FakeTensor, fake_cuda
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import (
    Attached,
    Mark,
    Order,
    ServedStreams,
    mark,
    new_guard,
    new_order,
    use,
    wait,
)

LIMIT_S = 20.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function on a thread of its own, and returns its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(LIMIT_S)
    (result,) = results
    return result


# Marks


def test_a_value_of_another_thread_is_ordered_by_its_mark(cuda: FakeCuda) -> None:
    def make() -> tuple[FakeTensor, Mark | None]:
        cuda.set_stream(cuda.new_stream(0))
        return cuda.compute(), mark()

    value, at = in_thread(make)
    assert not cuda.is_ordered(value)
    use(at, {"values": [value]})
    assert cuda.is_ordered(value)
    assert cuda.current_stream(0).number in value.kept_for


def test_a_failed_gpu_is_reported_once_and_raises_nothing(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    streams, guard = ServedStreams(), new_guard()
    before = mark()
    cuda.fails = True
    with caplog.at_level(logging.ERROR, "torchweft"):
        assert mark() is None
        wait(before)
        streams.end(streams.begin())
        with guard.lock, guard.order:
            pass
        attached = Attached(streams)
        attached.renew()
        attached.close()
    assert [record.message[:15] for record in caplog.records] == ["CUDA has failed"]


# Tasks


class Worker:
    """Threads that run parts of tasks when they are told to, in any order."""

    def __init__(self, cuda: FakeCuda, streams: ServedStreams) -> None:
        self.cuda, self.streams = cuda, streams

    def task(self, body: Callable[[], Any]) -> Any:
        def run() -> Any:
            begun = self.streams.begin()
            try:
                return body()
            finally:
                self.streams.end(begun)

        return in_thread(run)


def test_streams_that_a_task_has_set_are_followed_and_taken_back(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())

    def body() -> FakeTensor:
        cuda.set_stream(cuda.new_stream(0))
        cuda.set_device(3)
        return cuda.compute()

    begun = worker.streams.begin()
    value = body()
    worker.streams.end(begun)
    assert cuda.current_device() == 0
    assert cuda.current_stream(0) is cuda.default_stream(0)
    assert worker.task(lambda: cuda.is_ordered(value))


def test_the_work_on_a_device_that_a_task_is_the_first_to_use_is_ordered(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())

    def body() -> FakeTensor:
        cuda.add_context(1)
        return cuda.compute(1)

    value = worker.task(body)
    assert value.stream is cuda.default_stream(1)
    assert worker.task(lambda: cuda.is_ordered(value))
    assert worker.task(lambda: cuda.current_stream(1)) is not cuda.default_stream(1)


def test_the_work_of_the_task_that_initializes_cuda_is_ordered(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    earlier = worker.task(cuda.compute)
    cuda.is_on = False

    def body() -> FakeTensor:
        cuda.is_on = True
        return cuda.compute()

    held = worker.streams.begin()  # None: CUDA is not initialized yet
    value = worker.task(body)
    worker.streams.end(held)
    assert worker.task(lambda: cuda.is_ordered(value) and cuda.is_ordered(earlier))


def test_who_shares_a_lane_does_not_rely_on_waits_still_to_be_made(cuda: FakeCuda) -> None:
    streams = ServedStreams(most_lanes=2)
    begun = streams.begin()
    value = cuda.compute()
    streams.end(begun)
    first = streams.begin()
    taken, _ = streams._take()  # A task on another thread, which has not gone on from here.
    shares_first, shares_taken = streams.begin(), streams.begin()
    assert shares_taken is not None
    assert shares_taken._lane is taken
    assert cuda.is_ordered(value)
    for each in (shares_taken, shares_first, first):
        streams.end(each)


# Threads that live longer


def test_what_is_carried_to_another_thread_comes_after_this_one(cuda: FakeCuda) -> None:
    streams = ServedStreams()
    value = cuda.compute()
    assert in_thread(streams.carried(lambda: cuda.is_ordered(value)))


# Locks


def test_a_build_without_cuda_orders_nothing() -> None:
    assert isinstance(new_order(), Order) is device_streams.HAS_CUDA


# Random programs: tasks begin, compute, hand values on and end, in any order of their steps.


class Program:
    """Simulated threads, whose steps one thread takes; a thread is an entry of ``_local``."""

    def __init__(self, cuda: FakeCuda, seed: int, threads: int, most_lanes: int) -> None:
        self.cuda = cuda
        self.random = random.Random(seed)
        self.streams = ServedStreams(most_lanes)
        self.places = [threading.local() for _ in range(threads)]
        self.stacks: list[list[Attached | None]] = [[] for _ in range(threads)]
        self.began: list[list[int]] = [[] for _ in range(threads)]
        self.values: list[tuple[FakeTensor, Mark | None]] = []
        self.of_ended: list[FakeTensor] = []
        self.of_task: list[list[list[FakeTensor]]] = [[] for _ in range(threads)]
        self.locks = [Order() for _ in range(2)]
        self.under: dict[Order, list[FakeTensor]] = {each: [] for each in self.locks}
        self.attached = Attached(self.streams)

    def step(self) -> None:
        place = self.random.randrange(len(self.places))
        self.cuda._local = self.places[place]
        if place == 0:
            self.serve_attached()
        elif place == 1:
            self.compute(place)  # A thread of the program, on its own streams.
        else:
            self.random.choice([self.begin, self.end, self.compute, self.compute, self.set])(place)

    def check(self, values: list[FakeTensor]) -> None:
        for value in values:
            assert self.cuda.is_ordered(value)

    def serve_attached(self) -> None:
        self.attached.renew()
        self.check(self.of_ended)
        value = self.cuda.compute(self.random.choice(self.cuda.devices()))
        self.attached.publish()
        self.of_ended.append(value)
        self.values.append((value, mark()))

    def begin(self, place: int) -> None:
        self.stacks[place].append(self.streams.begin())
        self.of_task[place].append([])
        self.check(self.of_ended)

    def end(self, place: int) -> None:
        if self.stacks[place]:
            self.streams.end(self.stacks[place].pop())
            self.of_ended += self.of_task[place].pop()

    def set(self, place: int) -> None:
        if self.stacks[place] and self.random.random() < 0.3:
            self.cuda.add_context(1)
        elif self.stacks[place]:
            # As programs do: the new stream waits for the former.
            device = self.random.choice(self.cuda.devices())
            former, stream = self.cuda.current_stream(device), self.cuda.new_stream(device)
            self.cuda.wait(stream, self.cuda.record(former))
            self.cuda.set_stream(stream)

    def compute(self, place: int) -> None:
        if self.values and self.random.random() < 0.5:
            value, at = self.random.choice(self.values)
            use(at, value)
            self.check([value])
            assert self.cuda.current_stream(value.device).number in value.kept_for
        lock = self.random.choice(self.locks)
        if self.random.random() < 0.3:
            with lock:
                self.check(self.under[lock])
                self.under[lock].append(self.cuda.compute())
        if place > 1 and not self.stacks[place]:
            return  # Threads of a worker compute in tasks.
        made = self.cuda.compute(self.random.choice(self.cuda.devices()))
        self.values.append((made, mark()))
        if self.of_task[place]:
            self.of_task[place][-1].append(made)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 32),
    threads=st.integers(3, 7),
    most_lanes=st.integers(1, 4),
    devices=st.sampled_from([(0,), (0, 2)]),
)
def test_every_use_comes_after_its_value(
    seed: int, threads: int, most_lanes: int, devices: tuple[int, ...]
) -> None:
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch, devices) as cuda:
        program = Program(cuda, seed, threads, most_lanes)
        for _ in range(120):
            program.step()
        side = itertools.chain(*(lane.streams.values() for lane in program.streams._lanes))
        assert len(list(side)) <= most_lanes * 3
