from __future__ import annotations

from benchmarks.frame.figures import Round, ratio_of


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
