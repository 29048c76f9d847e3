"""PyTorch's thread-local modes: ended, or taken from a thread and given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tables import cases
from torchweft.engine.threads.interrupts import call
from torchweft.engine.threads.thread_modes import READERS, THREADS, UNTOUCHED, take_away, tidy

LIMIT_S = 20.0


class FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def set_device() -> None:
    torch.set_default_device("meta")


def disable_grad() -> None:
    torch.set_grad_enabled(False)


held: list[Any] = []


def entering(make: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that enters a context and never leaves it."""

    def enter() -> None:
        held.append(make())
        held[-1].__enter__()

    return enter


LEAVE_BEHIND: dict[str, Callable[[], None]] = {
    "set_grad_enabled": disable_grad,
    "no_grad": entering(torch.no_grad),
    "inference_mode": entering(torch.inference_mode),
    "autocast": entering(lambda: torch.autocast("cpu", torch.bfloat16)),
    "nested autocast": lambda: [LEAVE_BEHIND["autocast"]() for _ in range(3)] and None,
    "a default device": set_device,
    "a device": entering(lambda: torch.device("meta")),
    "a function mode": entering(FunctionMode),
    "a dispatch mode": entering(DispatchMode),
    "hooks": entering(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)
    ),
    "several": lambda: [LEAVE_BEHIND[name]() for name in SEVERAL] and None,
}


if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    del LEAVE_BEHIND["hooks"]  # This version of torch does not report them.

SEVERAL = [
    "a default device",
    "a device",
    "no_grad",
    "autocast",
    "a function mode",
    *(name for name in ["hooks"] if name in LEAVE_BEHIND),
    "a dispatch mode",
    "no_grad",
]


def look() -> tuple[Any, ...]:
    """Returns the effects that a call would notice of its thread's modes."""
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * leaf if leaf.requires_grad else leaf
    matrix = torch.ones(2, 2)
    saved = product.grad_fn._saved_self if product.grad_fn is not None else leaf  # type: ignore[attr-defined]
    return (
        leaf.device.type,
        product.requires_grad,
        product.is_inference(),
        (matrix @ matrix).dtype,
        saved.sum().item() if saved.device.type == "cpu" else None,
        torch.get_default_device().type,
        tuple(map(call, READERS)),
    )


PLAIN = ("cpu", True, False, torch.float32, 2.0, "cpu", UNTOUCHED)


def on_a_thread(run: Callable[[], Any]) -> Any:
    """Calls ``run`` on a new thread, whose modes end with it; returns its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join(LIMIT_S)
    held.clear()
    return results[0]


@cases("name", list(LEAVE_BEHIND))
def test_what_was_left_behind_is_ended(name: str) -> None:
    def run() -> list[Any]:
        seen = [look()]
        LEAVE_BEHIND[name]()
        seen.append(look())
        tidy()
        return [*seen, look(), torch.autocast_increment_nesting()]

    before, during, after, nesting = on_a_thread(run)
    assert before == after == PLAIN
    assert during != PLAIN
    assert nesting == 1


@cases("name", list(LEAVE_BEHIND))
def test_what_is_taken_away_is_given_back(name: str) -> None:
    def run() -> list[Any]:
        LEAVE_BEHIND[name]()
        seen = [look()]
        modes = take_away()
        assert modes is not None
        seen.append(look())
        modes.put_back()
        seen.append(look())
        tidy()
        return [*seen, look()]

    there, away, back, after = on_a_thread(run)
    assert there == back != PLAIN
    assert away == after == PLAIN


def test_modes_of_two_are_kept_apart_in_any_order() -> None:
    """Suspended and resumed coroutines need this."""

    def run() -> list[Any]:
        with torch.inference_mode():
            first_look, first = look(), take_away()
            with torch.autocast("cpu", torch.bfloat16):
                second_look, second = look(), take_away()
                between = look()
                assert first is not None
                assert second is not None
                first.put_back()
                again = [first_look == look()]
                first = take_away()
                second.put_back()
                again.append(second_look == look())
            assert first is not None
            first.put_back()
        return [between, again, look()]

    between, again, after = on_a_thread(run)
    assert between == after == PLAIN
    assert again == [True, True]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations use two threads; no task has set another number."""
    monkeypatch.setattr(THREADS, "wanted", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Worker:
    """A thread that runs tasks one after the other, as threads of a reactor do."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def run(self, task: Callable[[], Any]) -> Any:
        def serve() -> Any:
            before = THREADS.follow()
            try:
                return task()
            finally:
                THREADS.note(before)

        return self._pool.submit(serve).result(LIMIT_S)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.mark.usefixtures("two_threads")
def test_a_number_of_threads_that_a_task_sets_is_that_of_all_tasks() -> None:
    first, second = Worker(), Worker()
    try:
        assert [each.run(torch.get_num_threads) for each in (first, second)] == [2, 2]
        first.run(lambda: torch.set_num_threads(1))
        assert [each.run(torch.get_num_threads) for each in (second, first)] == [1, 1]
        second.run(lambda: torch.set_num_threads(3))
        assert [each.run(torch.get_num_threads) for each in (first, second)] == [3, 3]
    finally:
        first.close()
        second.close()
