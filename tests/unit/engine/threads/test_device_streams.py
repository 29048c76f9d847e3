from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda import FakeCuda, FakeTensor, fake_cuda
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import (
    Attached,
    Mark,
    Order,
    ServedStreams,
    keep,
    mark,
    new_guard,
    new_order,
    use,
    wait,
)
from torchweft.engine.threads.reactor import FairQueue, Reactor

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


def test_without_cuda_there_are_no_marks(cuda: FakeCuda) -> None:
    cuda.is_on = False
    assert mark() is None
    wait(None)
    use(None, [1])
    assert device_streams.devices() == ()
    assert not cuda.events


def test_a_build_without_cuda_makes_no_marks() -> None:
    if device_streams.HAS_CUDA:
        pytest.skip("this build has CUDA")
    assert mark() is None
    assert ServedStreams().begin() is None


def test_a_value_of_another_thread_is_ordered_by_its_mark(cuda: FakeCuda) -> None:
    def make() -> tuple[FakeTensor, Mark | None]:
        cuda.set_stream(cuda.new_stream(0))
        return cuda.compute(), mark()

    value, at = in_thread(make)
    assert not cuda.is_ordered(value)
    use(at, {"values": [value]})
    assert cuda.is_ordered(value)
    assert cuda.current_stream(0).number in value.kept_for


def test_a_mark_of_the_same_stream_costs_no_wait(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = mark()
    monkeypatch.setattr(cuda, "wait", lambda *_: pytest.fail("it waits for itself"))
    wait(at)


def test_tensors_are_found_in_containers(cuda: FakeCuda) -> None:
    values = [cuda.compute() for _ in range(3)]
    content: Any = (values[0], {"a": [values[1], 5]}, None, "text", torch.ones(1))
    assert device_streams.tensors_on_devices(content, values[2]) == values


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


def test_a_task_runs_on_a_side_stream_and_leaves_none_behind(cuda: FakeCuda) -> None:
    streams = ServedStreams()
    before = cuda.current_stream(0)
    begun = streams.begin()
    assert cuda.current_stream(0) is not before
    streams.end(begun)
    assert cuda.current_stream(0) is before


def test_tasks_that_follow_one_another_use_the_same_stream(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    used = {worker.task(lambda: cuda.compute().stream.number) for _ in range(5)}
    assert len(used) == 1
    assert len(cuda.made) == 1


def test_concurrent_tasks_use_different_streams(cuda: FakeCuda) -> None:
    streams = ServedStreams()
    outer = streams.begin()
    first = cuda.current_stream(0)
    inner = streams.begin()
    assert cuda.current_stream(0) is not first
    streams.end(inner)
    assert cuda.current_stream(0) is first
    streams.end(outer)


def test_a_task_comes_after_those_that_have_ended(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    held = worker.streams.begin()
    other = worker.task(cuda.compute)
    assert not cuda.is_ordered(other)
    worker.streams.end(held)
    assert worker.task(lambda: cuda.is_ordered(other))


def test_no_task_waits_for_the_default_stream(cuda: FakeCuda) -> None:
    value = cuda.compute()
    assert value.stream is cuda.default_stream(0)
    assert not Worker(cuda, ServedStreams()).task(lambda: cuda.is_ordered(value))


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


def test_the_current_device_is_kept_with_several_devices(cuda: FakeCuda) -> None:
    cuda.add_context(1)
    streams = ServedStreams()
    begun = streams.begin()
    assert cuda.current_device() == 0
    assert {cuda.current_stream(0), cuda.current_stream(1)} == set(cuda.made)
    streams.end(begun)
    assert cuda.current_device() == 0


def test_more_tasks_than_lanes_share_streams(cuda: FakeCuda) -> None:
    streams = ServedStreams(most_lanes=2)
    begun = [streams.begin() for _ in range(5)]
    assert len(cuda.made) == 2
    for each in reversed(begun):
        streams.end(each)
    assert streams.begin() is not None
    assert len(cuda.made) == 2


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


def test_tasks_that_share_a_lane_use_one_stream_of_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find that the lane has none yet."""
    served = ServedStreams(most_lanes=1)
    lane, _ = served._take()
    make, others = cuda.new_stream, list[Any]()

    def make_while_another_does(device: int) -> Any:
        monkeypatch.setattr(cuda, "new_stream", make)
        others.append(in_thread(lambda: lane.stream(device)))
        return make(device)

    monkeypatch.setattr(cuda, "new_stream", make_while_another_does)
    assert [lane.stream(0), lane.stream(0)] == others * 2


def test_nothing_is_kept_of_tasks(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    for _ in range(50):
        worker.task(cuda.compute)
    assert cuda.events == 1


# Threads that live longer


def test_an_attached_thread_is_ordered_in_both_directions(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    before = worker.task(cuda.compute)
    attached = Attached(worker.streams)

    def serve() -> tuple[bool, FakeTensor]:
        attached.renew()
        was_ordered = cuda.is_ordered(before)
        value = cuda.compute()
        attached.publish()
        return was_ordered, value

    was_ordered, value = in_thread(serve)
    assert was_ordered
    assert value.stream is not cuda.default_stream(0)
    assert worker.task(lambda: cuda.is_ordered(value))


def test_a_stream_that_an_attached_thread_has_set_stays(cuda: FakeCuda) -> None:
    worker = Worker(cuda, ServedStreams())
    own = cuda.new_stream(0)

    def serve() -> FakeTensor:
        attached = Attached(worker.streams)
        attached.renew()
        cuda.set_stream(own)
        between = worker.task(cuda.compute)
        attached.renew()
        assert cuda.is_ordered(between)
        value = cuda.compute()
        attached.close()
        return value

    value = in_thread(serve)
    assert value.stream is own
    assert worker.task(lambda: cuda.is_ordered(value))


def test_what_is_carried_to_another_thread_comes_after_this_one(cuda: FakeCuda) -> None:
    streams = ServedStreams()
    value = cuda.compute()
    assert in_thread(streams.carried(lambda: cuda.is_ordered(value)))


# Locks


def test_blocks_under_a_lock_are_ordered(cuda: FakeCuda) -> None:
    guard = new_guard()

    def hold() -> FakeTensor:
        cuda.set_stream(cuda.new_stream(0))
        with guard.lock, guard.order:
            return cuda.compute()

    value = in_thread(hold)
    assert not cuda.is_ordered(value)
    with guard.lock, guard.order:
        assert cuda.is_ordered(value)


def test_a_build_without_cuda_orders_nothing() -> None:
    assert isinstance(new_order(), Order) is device_streams.HAS_CUDA


# The reactor


def test_the_reactor_runs_each_task_on_side_streams(cuda: FakeCuda) -> None:
    reactor = Reactor("test", 4, FairQueue(limit=1000, limit_bytes=1 << 20))
    streams = ServedStreams()
    reactor.before_task, reactor.after_task = streams.begin, streams.end
    found: list[FakeTensor] = []
    ordered: list[bool] = []
    ended = threading.Semaphore(0)

    def work(_: object, __: object) -> None:
        ordered.append(all(map(cuda.is_ordered, found)))
        found.append(cuda.compute())
        ended.release()

    try:
        for _ in range(20):
            reactor.submit_task(work)
            assert ended.acquire(timeout=LIMIT_S)
            while reactor.busy:  # The task has released its caller before it ended.
                pass
    finally:
        assert reactor.close(LIMIT_S) == []
    assert all(ordered)
    assert all(each.stream is not cuda.default_stream(0) for each in found)


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


def test_keep_without_cuda_does_nothing() -> None:
    keep(torch.ones(1), [torch.ones(1)])
