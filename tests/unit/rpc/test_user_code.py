"""An exception of any type in the program's code, wherever Weft runs it, ends one call only."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.thorough import CHECKED, spread
from tests.thread_limits import no_new_threads
from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import enter
from torchweft.autograd.graph import roots_of
from torchweft.autograd.passes import LedPass
from torchweft.engine.worker.calls import current_call
from torchweft.errors import AutogradError, RemoteError
from torchweft.rpc.functions import async_execution

THREADS = 2
TIMES = THREADS + 2


class Own(BaseException):
    """The program's own exception class, not derived from ``Exception``."""


KINDS: list[type[BaseException]] = [
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    GeneratorExit,
    Own,
    ValueError,
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of(THREADS) as made:
        yield made


class InReduce:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        raise self.kind("in __reduce__")


class InGetstate(InReduce):
    __reduce__ = object.__reduce__

    def __getstate__(self) -> Any:
        raise self.kind("in __getstate__")


class InSetstate:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["kind"]("in __setstate__")


class InDel(InReduce):
    __reduce__ = object.__reduce__
    gone = threading.Event()

    def __del__(self) -> None:
        self.gone.set()
        raise self.kind("in __del__")


class InGetattr(InReduce):
    """A callable whose attributes cannot be read."""

    __reduce__ = object.__reduce__

    def __call__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "kind":
            raise AttributeError(name)
        raise self.kind("in __getattr__")

    @property
    def method(self) -> Any:
        raise self.kind("in a property")


class StrRaises(Exception):
    def __str__(self) -> str:
        raise self.args[0]("in __str__")

    __repr__ = __str__


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise self.args[0]("in __reduce__ of an error")


class DirRaises(AttributeError):
    """Python formats its traceback with suggestions, for which it inspects an object."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__("no such thing", name="thing", obj=self)
        self.kind = kind

    def __dir__(self) -> Any:
        raise self.kind("in __dir__")


class NotesRaise(Exception):
    @property
    def __notes__(self) -> Any:
        raise self.args[0]("in __notes__")


def returns(make: Callable[[Any], Any], kind: type[BaseException]) -> Any:
    return make(kind)


def raises(make: Callable[[Any], BaseException], kind: type[BaseException]) -> None:
    raise make(kind)


def raises_text(kind: type[BaseException], text: str) -> None:
    raise kind(text)


def fails_with_a_bad_attribute(kind: type[BaseException]) -> None:
    error = ValueError("has an attribute")
    error.attribute = InReduce(kind)  # type: ignore[attr-defined]
    raise error


async def coroutine_raises(kind: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise kind("in a coroutine")


@async_execution
def future_fails(kind: type[BaseException]) -> torch.futures.Future[Any]:
    future: torch.futures.Future[int] = torch.futures.Future()

    def follow(_: object) -> None:
        raise kind("in a callback")

    followed = future.then(follow)
    future.set_result(1)
    return followed


@async_execution
def future_of_a_bad_value(kind: type[BaseException]) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(InReduce(kind))
    return future


def takes(value: object) -> int:
    return 1


def cannot_be_looked_at(kind: type[BaseException]) -> InGetattr:
    return InGetattr(kind)


FAILING: dict[str, Callable[[Pair, Any], Any]] = {
    "a function": lambda pair, kind: pair.sync(raises_text, kind, "in the function"),
    "a coroutine": lambda pair, kind: pair.sync(coroutine_raises, kind),
    "pickling a result": lambda pair, kind: pair.sync(returns, InReduce, kind),
    "the state of a result": lambda pair, kind: pair.sync(returns, InGetstate, kind),
    "unpickling an argument": lambda pair, kind: pair.sync(takes, InSetstate(kind)),
    "unpickling a result": lambda pair, kind: pair.sync(returns, InSetstate, kind),
    "the text of an error": lambda pair, kind: pair.sync(raises, StrRaises, kind),
    "pickling an error": lambda pair, kind: pair.sync(raises, ReduceRaises, kind),
    "suggestions of a traceback": lambda pair, kind: pair.sync(raises, DirRaises, kind),
    "notes of an error": lambda pair, kind: pair.sync(raises, NotesRaise, kind),
    "an attribute of an error": lambda pair, kind: pair.sync(fails_with_a_bad_attribute, kind),
    "attributes of a callable": lambda pair, kind: pair.sync(InGetattr(kind)),
    "a future": lambda pair, kind: pair.sync(future_fails, kind),
    "the value of a future": lambda pair, kind: pair.sync(future_of_a_bad_value, kind),
    "making a value": lambda pair, kind: pair.fetch(pair.create(raises_text, kind, "no value")),
    "an error instead of a value": lambda pair, kind: pair.fetch(
        pair.create(raises, StrRaises, kind)
    ),
    "a value that cannot be fetched": lambda pair, kind: pair.fetch(
        pair.create(returns, InReduce, kind)
    ),
    "a property": lambda pair, kind: pair.call_method(
        pair.create(cannot_be_looked_at, kind), "method"
    ),
}


@pytest.mark.parametrize(("place", "kind"), spread(list(FAILING), KINDS, all_from=CHECKED))
def test_a_call_ends_with_what_its_code_raises(
    pair: Pair, place: str, kind: type[BaseException]
) -> None:
    for _ in range(TIMES):
        with pytest.raises(BaseException) as caught:
            FAILING[place](pair, kind)
        assert not isinstance(caught.value, TimeoutError), caught.value
    pair.check_serves(THREADS)


@pytest.mark.parametrize("kind", KINDS)
def test_futures_of_calls_end_with_it(pair: Pair, kind: type[BaseException]) -> None:
    makers = (InReduce, InGetstate, InSetstate)
    futures = [pair.start(returns, make, kind) for make in makers for _ in range(TIMES)]
    for future in futures:
        with pytest.raises(BaseException) as caught:
            future.wait()
        assert not isinstance(caught.value, TimeoutError), caught.value
    pair.check_serves(THREADS)


def test_a_remote_exit_does_not_exit_the_caller(pair: Pair) -> None:
    with pytest.raises(RemoteError, match="SystemExit: in __reduce__"):
        pair.sync(returns, InReduce, SystemExit)


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_that_raise_harm_nobody(pair: Pair, kind: type[BaseException]) -> None:
    def raise_it(_: object) -> None:
        raise kind("in a callback")

    for _ in range(TIMES):
        future = pair.start(takes, 1)
        future.add_done_callback(raise_it)
        followed = future.then(raise_it)
        assert future.wait() == 1
        with pytest.raises(BaseException, match="in a callback"):
            followed.wait()
    pair.check_serves(THREADS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_end_of_a_value_that_raises_harms_nobody(pair: Pair) -> None:
    InDel.gone.clear()
    reference = pair.create(returns, InDel, SystemExit)
    pair.sync(takes, 1)
    del reference
    assert InDel.gone.wait(LIMIT_S)
    pair.check_serves(THREADS)


async def starts_a_task_that_raises(kind: type[BaseException]) -> str:
    asyncio.get_running_loop().create_task(coroutine_raises(kind))
    await asyncio.sleep(0.01)
    return "answered"


async def has_a_callback_that_raises(kind: type[BaseException]) -> str:
    def raise_it() -> None:
        raise kind("in a callback of the loop")

    asyncio.get_running_loop().call_soon(raise_it)
    await asyncio.sleep(0.01)
    return "answered"


async def stops_the_loop(_: object) -> str:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return "answered"


@pytest.mark.parametrize(
    "function", [starts_a_task_that_raises, has_a_callback_that_raises, stops_the_loop]
)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_the_event_loop_survives_what_runs_on_it(
    pair: Pair, function: Any, kind: type[BaseException]
) -> None:
    beside = pair.start(asyncio.sleep, 0.03, "slept")
    for _ in range(TIMES):
        assert pair.sync(function, kind) == "answered"
    assert beside.wait() == "slept"
    pair.check_serves(THREADS)


circling: list[Pair] = []


def circles(depth: int) -> int:
    """Calls the other worker, which calls this one, and so on."""
    if not depth:
        return 0
    (pair,) = circling
    call = pair.back if depth % 2 == 0 else pair.sync
    return 1 + call(circles, depth - 1)  # type: ignore[no-any-return]


def test_calls_in_circles_find_threads_after_a_shortage(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    circling.append(pair)
    try:
        with no_new_threads(monkeypatch):
            for future in [pair.start(takes, number) for number in range(20)]:
                assert future.wait() == 1
        assert pair.sync(circles, 12) == 12
    finally:
        circling.clear()
    pair.check_serves(THREADS)


def test_a_log_that_raises_harms_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the worker's own tasks fails, and so does logging that failure."""

    def fail(*_: object) -> None:
        raise StrRaises(SystemExit)

    def cannot_log(*_: object, **__: object) -> None:
        raise SystemExit("in a handler of the log")

    monkeypatch.setattr("torchweft.engine.threads.reports._log.exception", cannot_log)
    for _ in range(TIMES):
        pair.callee.agent.reactor.submit_task(fail)
    pair.check_serves(THREADS)
    assert capsys.readouterr().err.count("StrRaises; logging it raised SystemExit") == TIMES


def test_what_shows_failures_may_raise(pair: Pair) -> None:
    shown = []

    def show(peer: object, error: BaseException) -> None:
        shown.append(error)
        raise SystemExit("in a log")

    pair.callee.on_failure = show
    for _ in range(TIMES):
        with pytest.raises(ValueError, match="the function's own"):
            pair.sync(raises_text, ValueError, "the function's own")
    assert len(shown) == TIMES
    pair.check_serves(THREADS)


def test_a_call_is_answered_even_where_its_outcome_cannot_be_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair.callee.reply_error
    failures = iter([SystemExit("of something unforeseen")])

    def once_broken(*args: Any) -> None:
        for failure in failures:
            raise failure
        real(*args)

    monkeypatch.setattr(pair.callee, "reply_error", once_broken)
    with pytest.raises(TypeError, match="could not send the result of the call: SystemExit"):
        pair.sync(raises_text, ValueError, "the function's own")
    pair.check_serves(THREADS)
    assert current_call.get() is None


class Raising(torch.autograd.Function):
    """Raises an exception of the given type in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, kind: type[BaseException]) -> torch.Tensor:
        ctx.kind = kind
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ctx.kind("in a backward")


def with_a_raising_function(tensor: torch.Tensor, kind: type[BaseException]) -> Any:
    result = Raising.apply(tensor, kind)
    return result


def with_a_raising_hook(tensor: torch.Tensor, kind: type[BaseException]) -> torch.Tensor:
    def hook(_: torch.Tensor) -> None:
        raise kind("in a hook")

    result = tensor * 2
    result.register_hook(hook)
    return result


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [with_a_raising_function, with_a_raising_hook])
def test_a_backward_pass_ends_with_what_it_meets(
    pair: Pair, function: Any, kind: type[BaseException]
) -> None:
    engine = pair.caller.engine
    for _ in range(TIMES):
        context_id = engine.contexts.get_or_create(engine.contexts.new_id()).id
        try:
            with enter(context_id):
                loss = pair.sync(function, torch.ones(2, requires_grad=True), kind).sum()
            with pytest.raises(AutogradError, match=r"in a (backward|hook)"):
                engine.backward(context_id, [loss])
        finally:
            engine.release(context_id)
    pair.check_serves(THREADS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_the_caller_raises_to_the_caller(pair: Pair, kind: type[BaseException]) -> None:
    engine = pair.caller.engine
    context_id = engine.contexts.get_or_create(engine.contexts.new_id()).id
    try:
        with enter(context_id):
            result = pair.sync(doubled, torch.ones(2, requires_grad=True))
            loss = with_a_raising_hook(result, kind).sum()
        expected = AutogradError if issubclass(kind, Exception) else kind
        with pytest.raises(expected, match="in a hook"):
            engine.backward(context_id, [loss])
        with enter(context_id):
            after = torch.ones(2, requires_grad=True)
            engine.backward(context_id, [pair.sync(doubled, after).sum()])
        assert engine.contexts.get(context_id).get_gradients()[after].tolist() == [2.0, 2.0]
    finally:
        engine.release(context_id)
    pair.check_serves(THREADS)


def modes() -> tuple[bool, bool, bool, str]:
    leaf = torch.ones(2, requires_grad=True)
    product = (leaf * 2).requires_grad
    device = str(torch.empty(0).device)
    return product, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), device


UNTOUCHED = (True, False, False, "cpu")


def leaves_modes_behind() -> Any:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.autocast("cpu").__enter__()
    return modes()


async def leaves_modes_behind_at_its_end() -> Any:
    await asyncio.sleep(0)
    return leaves_modes_behind()


async def modes_of_a_coroutine() -> Any:
    return modes()


async def awaits_within_modes(seconds: float) -> list[Any]:
    seen = []
    with torch.no_grad():
        await asyncio.sleep(seconds)
        seen.append(modes())
    with torch.autocast("cpu"), torch.device("meta"):
        await asyncio.sleep(seconds)
        seen.append(modes())
    with torch.inference_mode():
        await asyncio.sleep(seconds)
        seen.append(modes())
    return [*seen, modes()]


async def starts_a_task_within_modes() -> None:
    async def no_gradients() -> None:
        with torch.no_grad():
            await asyncio.sleep(0.01)

    _tasks.append(asyncio.get_running_loop().create_task(no_gradients()))


_tasks: list[Any] = []


def test_a_call_does_not_change_the_modes_of_others(pair: Pair) -> None:
    """The modes belong to the thread that happens to run the call."""
    for _ in range(TIMES):
        assert pair.sync(leaves_modes_behind) == (False, False, True, "meta")
        assert [pair.sync(modes) for _ in range(TIMES)] == [UNTOUCHED] * TIMES
    futures = [pair.start(leaves_modes_behind if odd else modes) for odd in (0, 1) * 20]
    assert [future.wait() for future in futures[::2]] == [UNTOUCHED] * 20


_may_end = threading.Event()


def ends_when_it_may() -> bool:
    return _may_end.wait(LIMIT_S)


def test_a_callback_does_not_change_the_modes_of_others(pair: Pair) -> None:
    seen = []
    for _ in range(TIMES):
        _may_end.clear()
        future = pair.start(ends_when_it_may)
        # Added before the answer: a callback of a completed future runs on this thread.
        left = future.then(lambda _: leaves_modes_behind())
        _may_end.set()
        left.wait()
        seen.append(pair.start(takes, 1).then(lambda _: modes()).wait())
    assert seen == [UNTOUCHED] * TIMES


def test_coroutines_have_modes_of_their_own(pair: Pair) -> None:
    within = [pair.start(awaits_within_modes, seconds) for seconds in (0.001, 0.002, 0.003)]
    assert [pair.sync(modes_of_a_coroutine) for _ in range(20)] == [UNTOUCHED] * 20
    expected = [
        (False, False, False, "cpu"),
        (True, False, True, "meta"),
        (False, True, False, "cpu"),
    ]
    assert [future.wait() for future in within] == [[*expected, UNTOUCHED]] * 3
    for _ in range(TIMES):
        assert pair.sync(leaves_modes_behind_at_its_end) == (False, False, True, "meta")
        pair.sync(starts_a_task_within_modes)
        assert pair.sync(modes_of_a_coroutine) == UNTOUCHED
    assert pair.sync(awaits_within_modes, 0.001) == [*expected, UNTOUCHED]


def tensors_of_many_kinds() -> list[torch.Tensor]:
    computed = torch.ones(2, requires_grad=True) * 2
    sparse = torch.eye(2).to_sparse()
    return [torch.ones(2), torch.nn.Parameter(torch.ones(2)), sparse, computed]


def seen_in(tensors: list[torch.Tensor]) -> list[tuple[bool, bool]]:
    return [(each.is_inference(), each.requires_grad) for each in tensors]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("begins_in_mode", [False, True])
def test_the_modes_of_a_waiting_thread_do_not_change_what_arrives(
    pair: Pair, mode: Any, begins_in_mode: bool
) -> None:
    """Else it would depend on the thread that happens to read the answer."""
    with mode() if begins_in_mode else contextlib.nullcontext():
        read_elsewhere = pair.start(tensors_of_many_kinds)
        read_here = pair.start(tensors_of_many_kinds)
    read_elsewhere.then(lambda done: done.wait()).wait()
    expected = seen_in(read_elsewhere.wait())
    with mode():
        arrived = [read_here.wait()]
        if begins_in_mode:
            arrived.append(pair.sync(tensors_of_many_kinds))
    assert [seen_in(each) for each in arrived] == [expected] * len(arrived)
    (torch.ones(2, requires_grad=True) * arrived[-1][0]).sum().backward()


def test_a_pass_outside_of_contexts_knows_whose_answers_it_awaits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread reads their connections itself."""
    read: list[list[object]] = []
    run = LedPass._run

    def noting(led: LedPass) -> None:
        read.append([*led._others])
        run(led)

    monkeypatch.setattr(LedPass, "_run", noting)
    start = torch.ones(2, requires_grad=True)
    loss = pair.sync(doubled, start * 3).sum()
    pair.caller.engine.run_into_grad(roots_of([loss]), PassMode())
    assert start.grad is not None
    assert start.grad.tolist() == [6.0, 6.0]
    assert read == [[pair.peer]]
