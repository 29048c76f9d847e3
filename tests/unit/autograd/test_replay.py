"""Tests that a pass is repeated with tensors that are computed again; the engine is fake."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import REQUIRES_GRAD, Context
from torchweft.autograd.graph import place_of, roots_of
from torchweft.autograd.replay import Recomputable, Replay
from torchweft.errors import AutogradError, WorkerLost

MODE = PassMode()


def lost(*names: str) -> AutogradError:
    """Returns a pass's error, caused by a chain of errors that starts with the lost worker."""
    error: BaseException = WorkerLost("lost", worker=names[0])
    for name in (*names[1:], "the pass"):
        caught, error = error, AutogradError(name)
        error.__cause__ = caught
    assert isinstance(error, AutogradError)
    return error


class Engine:
    """Records its calls; each attempt ends as the test says."""

    def __init__(self, context: Context, outcomes: Sequence[BaseException | None]) -> None:
        self.contexts = SimpleNamespace(get=lambda context_id: context)
        self.attempts: list[dict[str, Any]] = []
        self._outcomes = list(outcomes)

    def run(
        self,
        context_id: int,
        roots: Any,
        mode: Any,
        *,
        gradients: Any,
        input_gradients: Any,
        **others: Any,
    ) -> None:
        replaced = dict(input_gradients._replaced)
        self.attempts.append({"replaced": replaced, "gradients": gradients, **others})
        if gradients is not None:
            gradients.add_all([(LEAF, torch.ones(()))], ())
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise outcome


LEAF = torch.ones((), requires_grad=True)


class Map:
    """Makes results that came as answers, and new results on each rerun."""

    def __init__(self, context: Context, count: int = 2) -> None:
        self._context = context
        self._count = count
        self.runs = 0

    def results(self) -> list[Tensor]:
        return [self._received() for _ in range(self._count)]

    def _received(self) -> Tensor:
        number = len(self._context.receives()) + 1
        tensors, flags = [torch.ones(())], [REQUIRES_GRAD]
        return self._context.record_receive(number, 1, tensors, flags, is_answer=True)[0]

    def run_again(self) -> list[Tensor]:
        self.runs += 1
        return self.results()


@pytest.fixture
def context() -> Any:
    made = Context(7, 0)
    yield made
    made.clear()


def mapped(context: Context, count: int = 2) -> tuple[Map, list[Tensor]]:
    made = Map(context, count)
    results = made.results()
    context.recomputable.append(Recomputable(results, lambda: made.run_again()))
    return made, results


def run(context: Context, roots: Sequence[Tensor], *outcomes: BaseException | None) -> Any:
    engine = Engine(context, outcomes)
    any_engine: Any = engine
    replay = Replay(any_engine, 7, roots_of(roots))
    return lambda: replay.gradients_of_leaves(MODE), engine.attempts


def test_a_pass_that_succeeds_is_run_once(context: Context) -> None:
    made, results = mapped(context)
    attempt, attempts = run(context, results, None)
    assert attempt() == {LEAF: 1}
    assert made.runs == 0
    assert [each["retains_here"] for each in attempts] == [True]


def test_without_maps_nothing_is_kept_for_another_attempt(context: Context) -> None:
    attempt, attempts = run(context, [LEAF], None)
    attempt()
    assert [each["retains_here"] for each in attempts] == [False]


@pytest.mark.parametrize("names", [("a",), ("a", "in a part of it")])
def test_after_a_loss_the_pass_goes_on_from_new_results(
    context: Context, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    made, results = mapped(context)
    attempt, attempts = run(context, results, lost(*names), None)
    assert attempt() == {LEAF: 1}, "nothing of the first attempt is kept"
    assert made.runs == 1
    assert attempts[0]["replaced"] == {}
    assert attempts[1]["replaced"].keys() == {place_of(each) for each in results}
    assert "'a' was lost in a backward pass" in caplog.text


def test_each_loss_of_another_worker_is_survived(context: Context) -> None:
    made, results = mapped(context)
    attempt, attempts = run(context, results, lost("a"), lost("b"), None)
    assert attempt() == {LEAF: 1}
    assert (made.runs, len(attempts)) == (2, 3)
    first, second = attempts[1]["replaced"], attempts[2]["replaced"]
    assert second.keys() == first.keys() | {place_of(tensor) for tensor in first.values()}
    assert all(first[place] is not second[place] for place in first)


def test_what_was_replaced_is_in_later_passes_too(context: Context) -> None:
    made, results = mapped(context)
    attempt, attempts = run(context, results, lost("a"), None, None)
    attempt()
    attempt()
    assert made.runs == 1
    assert attempts[2]["replaced"] == attempts[1]["replaced"]


def test_requests_of_others_are_repeated_with_what_made_them(context: Context) -> None:
    made, results = mapped(context)
    (asked,) = context.record_receive(99, 1, [torch.ones(())], [REQUIRES_GRAD])
    attempt, _ = run(context, [*results, asked], lost("a"), None)
    assert attempt() == {LEAF: 1}
    assert made.runs == 1


def test_a_pass_for_inputs_leaves_nothing_that_could_be_there_twice(context: Context) -> None:
    made, results = mapped(context)
    other = Map(context, 1).results()
    any_engine: Any = Engine(context, [lost("a"), None])
    replay = Replay(any_engine, 7, roots_of([*results, *other]))
    assert replay.gradients_of(other, MODE._replace(for_inputs=True)) == [None]
    assert made.runs == 1


def test_a_worker_that_is_lost_twice_is_too_much(context: Context) -> None:
    made, results = mapped(context)
    attempt, _ = run(context, results, lost("a"), lost("a"))
    with pytest.raises(AutogradError, match="the pass"):
        attempt()
    assert made.runs == 1


def test_other_errors_are_not_survived(context: Context) -> None:
    made, results = mapped(context)
    attempt, _ = run(context, results, AutogradError("a shape"))
    with pytest.raises(AutogradError, match="a shape"):
        attempt()
    assert made.runs == 0


def test_what_came_otherwise_cannot_be_had_again(context: Context) -> None:
    made, results = mapped(context)
    other = Map(context, 1).results()
    attempt, _ = run(context, [*results, *other], lost("a"))
    with pytest.raises(AutogradError):
        attempt()
    assert made.runs == 0


def test_what_the_roots_do_not_lead_to_need_not_be_had_again(context: Context) -> None:
    made, results = mapped(context)
    Map(context, 1).results()
    attempt, _ = run(context, results, lost("a"), None)
    assert attempt() == {LEAF: 1}
    assert made.runs == 1


def test_all_maps_run_again_in_their_order(context: Context) -> None:
    first, results = mapped(context, 1)
    order: list[str] = []
    first.run_again = lambda: order.append("first") or first.results()  # type: ignore[method-assign, func-returns-value]
    second, _ = mapped(context, 1)
    second.run_again = lambda: order.append("second") or second.results()  # type: ignore[method-assign, func-returns-value]
    run(context, results, lost("a"), None)[0]()
    assert order == ["first", "second"]


def test_running_again_may_fail(context: Context) -> None:
    made, results = mapped(context)

    def nobody_left() -> list[Tensor]:
        raise WorkerLost("nobody is left", worker="b")

    made.run_again = nobody_left  # type: ignore[method-assign]
    attempt, _ = run(context, results, lost("a"))
    with pytest.raises(WorkerLost, match="nobody is left"):
        attempt()


def test_what_this_worker_has_computed_itself_is_replaced_too() -> None:
    context = Context(7, 0)
    weight = torch.ones((), requires_grad=True)
    own = weight * 2

    class Own(Map):
        def run_again(self) -> list[Tensor]:
            return [*super().run_again(), weight * 2]

    made = Own(context, 1)
    results = [*made.results(), own]
    context.recomputable.append(Recomputable(results, lambda: made.run_again()))
    attempt, attempts = run(context, results, lost("a"), None)
    attempt()
    assert attempts[1]["replaced"].keys() == {place_of(result) for result in results}
    context.clear()


def test_gradients_of_inputs_are_those_of_the_last_attempt(context: Context) -> None:
    made, results = mapped(context)
    any_engine: Any = Engine(context, [lost("a"), None])
    replay = Replay(any_engine, 7, roots_of(results))
    assert replay.gradients_of([results[0]], MODE._replace(for_inputs=True)) == [None]
    assert made.runs == 1
    assert [each["gradients"] for each in any_engine.attempts] == [None, None]
