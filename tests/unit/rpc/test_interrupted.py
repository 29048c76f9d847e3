"""Ctrl-C at every step of a call in the main thread loses no connection, call or frame.

Nor does a signal handler that makes a call itself.

Python runs signal handlers at the start of a function and after a call has returned. The tests
raise at each of these steps in turn, until a call has no more of them; ``make test`` skips some.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from tests.interrupting import Interrupt, interrupt_at
from tests.thorough import every
from tests.unit.engine.worker.group import LIMIT_S, wait_until
from tests.unit.rpc.pair import Pair, pair_of
from torchweft import autograd, knobs, native
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import current_id, enter
from torchweft.autograd.engine import ENGINE
from torchweft.autograd.graph import roots_of
from torchweft.engine.threads import interrupts
from torchweft.engine.worker import current as current_agent
from torchweft.errors import CallCancelled
from torchweft.rpc.calls import Future
from torchweft.rpc.codec import Decoder


def double(value: Any) -> Any:
    return value * 2


TWINS = ["plain", "native"]


@pytest.fixture(
    scope="module",
    params=[(twin, over) for twin in TWINS for over in ("unix", "tcp")],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    twin, over = request.param
    with with_twin(twin), pair_of(2, over) as made:
        made.sync(double, 1)
        yield made


@pytest.fixture(scope="module", params=TWINS)
def local(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair for backward passes, which are the same over each kind of connection."""
    with with_twin(request.param), knobs.REFERENCE_BATCH_S.override(0.001), pair_of(2) as made:
        made.sync(double, 1)
        yield made


@contextlib.contextmanager
def with_twin(twin: str) -> Iterator[None]:
    """Has workers that are made in the block use a twin of connections."""
    if twin == "native" and native.native is None:
        pytest.skip(native.reason)
    with pytest.MonkeyPatch.context() as patch:
        if twin == "plain":
            patch.setattr("torchweft.engine.io.link.native", None)
        yield


def check_is_sound(pair: Pair) -> None:
    """Checks that calls are answered both ways, and that earlier ones have left nothing behind."""
    agent = pair.caller.agent
    link = pair.peer.link
    assert link is not None
    agent.links.mend()  # The timer thread does this once a second.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pair.back, double, 3).result() == 6
    assert pair.sync(double, 4) == 8
    wait_until(lambda: not len(agent.calls), "the end of all calls")
    note = agent.reactor.notes.get(interrupts.main_id, lambda: None)()
    assert note is None or not note.parts()  # The main thread waits for nothing.
    wait_until(link.claim, "the right to read")
    link.unclaim()
    agent.reactor.resume_reading(link.read_fd)
    assert pair.peer.lost is None
    assert pair.peer_of_callee.lost is None


def call_at_once(pair: Pair) -> object:
    return pair.sync(double, 2)


def call_and_wait(pair: Pair) -> object:
    return pair.start(double, 2).wait()


def send_much(pair: Pair) -> object:
    return pair.sync(double, torch.ones(50_000))


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.parametrize(("way", "stride"), [(call_at_once, 1), (call_and_wait, 1), (send_much, 7)])
def test_a_call_may_be_interrupted_at_any_step(
    pair: Pair, way: Callable[[Pair], object], stride: int
) -> None:
    assert threading.get_ident() == interrupts.main_id
    step = 1
    while interrupt_at(step, lambda: way(pair)):
        check_is_sound(pair)
        step += every(stride)
    assert step > 25


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.parametrize(("way", "stride"), [(call_at_once, 1), (call_and_wait, 1), (send_much, 7)])
def test_a_signal_handler_may_call_at_any_step(
    pair: Pair, way: Callable[[Pair], object], stride: int
) -> None:
    outcomes: list[object] = []

    def call() -> None:
        sys.setprofile(None)
        outcomes.append(pair.sync(double, 5))

    step = 1
    while interrupt_at(step, lambda: outcomes.append(way(pair)), call):
        assert outcomes[0] == 10
        assert torch.equal(torch.as_tensor(outcomes[1]), torch.as_tensor(expected[way]))
        outcomes.clear()
        check_is_sound(pair)
        step += every(stride)
    assert step > 25


expected = {call_at_once: 4, call_and_wait: 4, send_much: torch.full((50_000,), 2.0)}


def pass_in(pair: Pair) -> tuple[int, Callable[[], None]]:
    """Returns a new context, and a function that runs a backward pass over one hop in it."""
    engine = pair.caller.engine
    context_id = engine.contexts.get_or_create(engine.contexts.new_id()).id
    leaf = torch.ones(3, requires_grad=True)
    with enter(context_id):
        loss = pair.sync(double, leaf).sum()

    def run() -> None:
        engine.backward(context_id, [loss])
        (gradient,) = engine.contexts.get(context_id).get_gradients().values()
        assert torch.equal(gradient, torch.full((3,), 2.0))

    return context_id, run


@pytest.mark.keeps("threads", "descriptors")
def test_a_backward_pass_may_be_interrupted_at_any_step(local: Pair) -> None:
    assert threading.get_ident() == interrupts.main_id
    step, is_interrupted = 1, True
    while is_interrupted:
        context_id, run = pass_in(local)
        is_interrupted = interrupt_at(step, run)
        check_is_sound(local)
        local.caller.engine.release(context_id)
        step += every(1)
    assert step > 100
    context_id, run = pass_in(local)
    run()
    local.caller.engine.release(context_id)


def step_in_a_context(pair: Pair) -> None:
    with autograd.context() as context_id:
        leaf = torch.ones(3, requires_grad=True)
        autograd.backward(context_id, [pair.sync(double, leaf).sum()])


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_nothing_of_an_interrupted_context_stays(local: Pair) -> None:
    engines = local.caller.engine, local.callee.engine

    def left() -> list[object]:
        gc.collect()
        return [[each.contexts.ids(), each.passes.led, each.passes.parts] for each in engines]

    current_agent.install(None)
    current_agent.install(local.caller.agent)
    local.caller.agent.slots[ENGINE] = local.caller.engine
    try:
        step = 1
        while interrupt_at(step, lambda: step_in_a_context(local)):
            assert current_id() == 0
            if step % 20 == 0:
                check_is_sound(local)
            step += every(1)
        assert step > 100
        step_in_a_context(local)
        wait_until(lambda: left() == [[[], {}, {}]] * 2, "the release of all contexts")
    finally:
        current_agent.install(None)


def await_no_records(pair: Pair, step: int) -> None:
    """Waits until no message outside of contexts is recorded, and no part of a pass is left."""
    engines = pair.caller.engine, pair.callee.engine

    def are_gone() -> bool:
        left = [[each.outside.count(), each.passes.led, each.passes.parts] for each in engines]
        return left == [[(0, 0), {}, {}]] * 2

    def are_collected() -> bool:
        gc.collect()
        return are_gone()

    if not are_gone():  # A collection takes longer than the rest of a step.
        wait_until(are_collected, f"the records of step {step} to go")


@pytest.mark.keeps("threads", "descriptors")
def test_nothing_of_an_interrupted_pass_outside_of_contexts_stays(
    local: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no other pass follows."""
    # pytest would keep exceptions of finalizers, and by their frames the graph.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    step, is_interrupted = 1, True
    while is_interrupted:
        loss = local.sync(double, torch.ones(3, requires_grad=True) * 3).sum()
        run = partial(local.caller.engine.run_into_grad, roots_of([loss]), PassMode())
        is_interrupted = interrupt_at(step, run)
        del loss, run
        await_no_records(local, step)
        step += every(5)
    assert step > 150
    check_is_sound(local)


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_the_graph_of_an_answer_goes_if_its_caller_is_interrupted(local: Pair) -> None:
    """At each step after the answer has come."""
    has_come: list[bool] = []

    def interrupt_after_answer() -> None:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not Decoder.result_of.__code__:
            frame = frame.f_back
        if frame is not None:
            has_come.append(True)
            raise Interrupt

    def run() -> None:
        local.sync(double, torch.ones(3, requires_grad=True) * 3)

    step = 1
    while interrupt_at(step, run, interrupt_after_answer):
        await_no_records(local, step)
        step += every(1)
    assert has_come
    check_is_sound(local)


@pytest.mark.keeps("threads", "descriptors")
def test_a_signal_handler_may_call_at_any_step_of_a_backward_pass(local: Pair) -> None:
    outcomes: list[object] = []

    def call() -> None:
        sys.setprofile(None)
        outcomes.append(local.sync(double, 5))

    step, is_interrupted = 1, True
    while is_interrupted:
        context_id, run = pass_in(local)
        is_interrupted = interrupt_at(step, run, call)
        check_is_sound(local)
        local.caller.engine.release(context_id)
        assert outcomes == [10] * is_interrupted
        outcomes.clear()
        step += every(5)
    assert step > 100


@pytest.mark.keeps("threads", "descriptors")
def test_the_future_of_an_interrupted_wait_is_completed(pair: Pair) -> None:
    outcomes: list[object] = []
    for step in range(1, 61, every(1)):
        future = pair.start(double_soon)
        allow = threading.Timer(0.01, may_end.set)  # By then the main thread waits, or has left.
        allow.start()
        is_interrupted = interrupt_at(step, future.wait)
        allow.join()
        check_is_sound(pair)
        if is_interrupted:
            outcomes.append(ended(future))
    assert 4 in outcomes


@pytest.mark.keeps("threads", "descriptors")
def test_a_signal_handler_may_call_during_a_wait(pair: Pair) -> None:
    outcomes: list[object] = []

    def call(_: int, __: object) -> None:
        outcomes.append(pair.sync(double, 5))
        may_end.set()

    before = signal.signal(signal.SIGALRM, call)
    try:
        future = pair.start(double_soon)
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # By then it waits; both are right.
        assert future.wait() == 4
    finally:
        signal.signal(signal.SIGALRM, before)
    assert outcomes == [10]
    check_is_sound(pair)


def ended(future: Future[Any]) -> object:
    """Returns the outcome, or the type of the error, of a future that must end."""
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(future.wait).result(LIMIT_S)
        except (CallCancelled, Interrupt) as error:  # Interrupted as it took the value.
            return type(error)


may_end = threading.Event()


def double_soon() -> int:
    assert may_end.wait(LIMIT_S)
    may_end.clear()
    return 4
