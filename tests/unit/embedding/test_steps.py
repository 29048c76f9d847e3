from __future__ import annotations

import random

import pytest

from torchweft.embedding import StepError
from torchweft.embedding.steps import Due, Steps

TRAINERS = ["a", "b"]


def test_a_trainer_that_is_not_in_the_step_is_refused_and_nothing_changes() -> None:
    steps: Steps[str] = Steps(TRAINERS, 0, "ps0")
    with pytest.raises(StepError, match=r"'ps0' is at step 0 of trainer 'b'.*sent step 1"):
        steps.push(1, 1, "b1", 0)
    with pytest.raises(StepError) as caught:
        steps.check_pull(0, 3)
    assert (caught.value.step, caught.value.expected, caught.value.trainer) == (3, 0, "a")
    assert steps.push(1, 0, "b0", 0) == Due([], [], [])


def test_a_trainer_that_gave_a_push_up_and_goes_on_is_told_what_to_do() -> None:
    steps: Steps[str] = Steps(TRAINERS, 0, "ps0")
    steps.push(1, 0, "b0", 0)
    with pytest.raises(StepError, match="before 'a' made it; close the tables on all") as caught:
        steps.check_pull(1, 1)
    assert (caught.value.trainer, caught.value.step, caught.value.expected) == ("b", 1, 0)


def test_only_pushes_that_need_a_lost_trainer_fail() -> None:
    steps: Steps[str] = Steps(TRAINERS, 1)
    for step in range(2):
        steps.push(1, step, f"b{step}", 0)
    assert steps.lose(1).failed == []
    steps.push(0, 0, "a0", 0)
    assert steps.push(0, 1, "a1", 0).applied == [["a1", "b1"]]
    assert steps.push(0, 2, "a2", 0).answered == [(0, 2)]  # Two steps are applied.
    assert steps.push(0, 3, "a3", 0).failed == [(0, 3)]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_interleaving_exceeds_the_bound_or_changes_the_order(bound: int) -> None:
    for seed in range(50):
        draws = random.Random(seed)
        steps: Steps[tuple[int, int]] = Steps(["a", "b", "c"], bound)
        free, applied = {0, 1, 2}, []
        while any(steps.step_of(each) < 8 for each in range(3)):
            ready = [each for each in free if steps.step_of(each) < 8]
            assert ready, "all trainers wait for each other"
            trainer = draws.choice(ready)
            step = steps.step_of(trainer)
            steps.check_pull(trainer, step)
            free.discard(trainer)
            due = steps.push(trainer, step, (trainer, step), steps.version)
            applied += [push for pushes in due.applied for push in pushes]
            free |= {each for each, _ in due.answered}
        assert applied == [(trainer, step) for step in range(8) for trainer in range(3)]
        assert max(steps.staleness) <= bound
