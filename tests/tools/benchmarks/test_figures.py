from __future__ import annotations

from benchmarks.frame.figures import Round, p99, ratio_of


def test_p99_is_the_value_that_ninety_nine_of_a_hundred_meet() -> None:
    assert p99([Round([float(value) for value in range(100, 0, -1)])]) == 99.0
    assert p99([Round([1.0] * 197 + [7.0, 8.0, 9.0])]) == 7.0


def test_no_p99_of_few_values_or_of_overlapping_operations() -> None:
    assert p99([Round([1.0] * 99)]) is None
    assert p99([Round([1.0] * 200, operations=100)]) is None


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was three times slower in the second round, which affects no ratio.
    torch = [Round([6.0]), Round([18.0]), Round([8.0])]
    weft = [Round([1.0]), Round([3.0]), Round([2.0])]
    ratio = ratio_of(torch, weft)
    assert ratio is not None
    assert (ratio.median, ratio.worst, ratio.best) == (6.0, 4.0, 6.0)


def test_side_that_failed_is_compared_in_the_rounds_that_it_did() -> None:
    ratio = ratio_of([Round([6.0])], [Round([2.0]), Round([100.0])])
    assert ratio is not None
    assert ratio.median == 3.0
