from __future__ import annotations

import pytest

from benchmarks.frame.figures import Round, figures_of, p99, ratio_of


def test_p99_is_the_value_that_ninety_nine_of_a_hundred_meet() -> None:
    assert p99([Round([float(value) for value in range(100, 0, -1)])]) == 99.0
    assert p99([Round([1.0] * 197 + [7.0, 8.0, 9.0])]) == 7.0


def test_p99_is_over_the_values_of_all_rounds() -> None:
    assert p99([Round([1.0] * 99), Round([5.0] * 2)]) == 5.0


def test_no_p99_of_few_values_or_of_overlapping_operations() -> None:
    assert p99([Round([1.0] * 99)]) is None
    assert p99([Round([1.0] * 200, operations=100)]) is None


def test_figures_are_medians_and_absent_cpu_time_is_none() -> None:
    figures = figures_of([Round([1.0, 2.0, 3.0], 0.5), Round([4.0, 5.0], 0.7)])
    assert figures.median == 3.0
    assert figures.cpu == pytest.approx(0.6)
    assert figures_of([Round([1.0])]).cpu is None


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was three times slower in the second round, which affects no ratio.
    torch = [Round([6.0]), Round([18.0]), Round([8.0])]
    weft = [Round([1.0]), Round([3.0]), Round([2.0])]
    ratio = ratio_of(torch, weft)
    assert ratio is not None
    assert (ratio.median, ratio.worst, ratio.best) == (6.0, 4.0, 6.0)


def test_ratio_of_another_figure() -> None:
    ratio = ratio_of([Round([1.0], 8.0)], [Round([1.0], 2.0)], "cpu")
    assert ratio is not None
    assert ratio.median == 4.0


def test_no_ratio_where_a_side_was_not_measured() -> None:
    assert ratio_of([], [Round([1.0])]) is None
    assert ratio_of([Round([1.0])], [Round([1.0])], "p99") is None


def test_side_that_failed_is_compared_in_the_rounds_that_it_did() -> None:
    ratio = ratio_of([Round([6.0])], [Round([2.0]), Round([100.0])])
    assert ratio is not None
    assert ratio.median == 3.0
