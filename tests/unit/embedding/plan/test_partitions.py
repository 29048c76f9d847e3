from __future__ import annotations

import pytest

from torchweft.embedding import StepCost, fit_step_cost
from torchweft.errors import ConfigurationError


def test_the_model_is_found_in_exact_times() -> None:
    cost = StepCost(0.8, 0.01, 0.1)
    found = fit_step_cost([(p, cost.step_s(p)) for p in (1, 2, 4, 16)])
    assert found == pytest.approx(cost)


def test_noise_is_averaged() -> None:
    cost = StepCost(0.8, 0.01, 0.1)
    measured = [(p, cost.step_s(p) + sign * 0.01) for p in (1, 2, 4, 8) for sign in (-1, 1)]
    assert fit_step_cost(measured) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("cost", "limit", "best"),
    [
        (StepCost(0.9, 0.1, 0), 8, 3),  # the root of 9
        (StepCost(0.9, 0.1, 0), 2, 2),
        (StepCost(0.7, 0.1, 5), 8, 3),  # between 2 and 3: 0.45 and 0.433
        (StepCost(0.05, 0.1, 0), 8, 1),
        (StepCost(0.9, 0.0, 0), 8, 8),
        (StepCost(0.9, -0.1, 0), 8, 8),
        (StepCost(-0.9, 0.1, 0), 8, 1),
        (StepCost(-0.9, -0.01, 0), 8, 1),
    ],
)
def test_the_best_number_has_the_shortest_step(cost: StepCost, limit: int, best: int) -> None:
    assert cost.best(limit) == best
    assert min(range(1, limit + 1), key=cost.step_s) == best


def test_two_numbers_are_too_few() -> None:
    with pytest.raises(ConfigurationError, match=r"\[1, 2\] partitions.*3 different"):
        fit_step_cost([(1, 0.1), (2, 0.1), (2, 0.2)])
