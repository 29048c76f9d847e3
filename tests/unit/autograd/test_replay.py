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
