"""An exception of any type in the program's code, wherever Weft runs it, ends one call only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.thorough import CHECKED, spread
from tests.thread_limits import no_new_threads
from tests.unit.rpc.pair import Pair, pair_of
from torchweft.autograd.contexts import enter
from torchweft.engine.worker.calls import current_call
from torchweft.errors import AutogradError
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


def test_a_call_does_not_change_the_modes_of_others(pair: Pair) -> None:
    """The modes belong to the thread that happens to run the call."""
    for _ in range(TIMES):
        assert pair.sync(leaves_modes_behind) == (False, False, True, "meta")
        assert [pair.sync(modes) for _ in range(TIMES)] == [UNTOUCHED] * TIMES
    futures = [pair.start(leaves_modes_behind if odd else modes) for odd in (0, 1) * 20]
    assert [future.wait() for future in futures[::2]] == [UNTOUCHED] * 20
