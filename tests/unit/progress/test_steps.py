"""Tests the rate of a loop's steps, in virtual time."""

from __future__ import annotations

import pytest
import torch

from torchweft.progress.steps import Steps, readable_figure


def test_before_the_first_step_nothing_is_known() -> None:
    steps = Steps(10, 0.0)
    assert steps.per_s is None
    assert steps.left_s(5.0) is None


def test_even_steps() -> None:
    steps = Steps(10, 0.0)
    steps.begin(100.0)
    for now in (102.0, 104.0, 106.0):
        steps.add(1, {}, now)
    assert steps.per_s == pytest.approx(0.5)
    assert steps.left_s(106.0) == pytest.approx(14.0)
    assert steps.left_s(107.0) == pytest.approx(13.0)


def test_a_step_that_hangs_does_not_use_up_the_time_of_the_others() -> None:
    steps = Steps(10, 0.0)
    steps.add(1, {}, 2.0)
    assert steps.left_s(1000.0) == pytest.approx(16.0)


def test_the_rate_follows_a_change() -> None:
    steps = Steps(None, 0.0)
    now = 0.0
    for seconds in [0.1] * 1000 + [1.0] * 100:
        now += seconds
        steps.add(1, {}, now)
    assert steps.per_s == pytest.approx(1.0, rel=0.4)
    assert steps.left_s(now) is None


def test_several_steps_at_once_and_more_than_there_were_to_be() -> None:
    steps = Steps(10, 0.0)
    steps.add(20, {}, 10.0)
    assert steps.count == 20
    assert steps.per_s == pytest.approx(2.0)
    assert steps.left_s(10.0) == 0.0


def test_a_figure_stays_until_there_is_another() -> None:
    steps = Steps(None, 0.0)
    steps.add(1, {"loss": "0.5", "accuracy": "0.25"}, 1.0)
    steps.add(1, {"loss": "0.25"}, 2.0)
    assert steps.figures == {"loss": "0.25", "accuracy": "0.25"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (float("nan"), "nan"),
        (1234567, "1234567"),
        ("warm-up", "warm-up"),
        (None, "None"),
        (torch.tensor(0.123456, requires_grad=True), "0.1235"),
        (torch.tensor([1.0, 2.0]), "tensor([1., 2.])"),
    ],
)
def test_figures_are_short(value: object, text: str) -> None:
    assert readable_figure(value) == text
