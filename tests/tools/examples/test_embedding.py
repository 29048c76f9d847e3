"""Tests the embedding example: its data, its measures of quality, its options and its picture."""

from __future__ import annotations

import math

import pytest
import torch
from choices import parse_options
from quality import auc, quality_of


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(10, (40,), generator=generator).double()  # many are equal
    clicked = torch.randint(2, (40,), generator=generator).double()
    above = scores[clicked > 0][:, None] - scores[clicked == 0][None]
    expected = ((above > 0).double() + (above == 0).double() / 2).mean()
    assert auc(scores, clicked) == pytest.approx(float(expected))
    assert auc(torch.zeros(40), clicked) == pytest.approx(0.5)
    assert quality_of(torch.zeros(40), clicked).log_loss == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--staleness -1", "-1 is not a whole number from 0 up"),
        ("--servers 0", "0 is not a whole number from 1 up"),
        ("--optimizer best", "invalid choice: 'best'"),
        ("--cache 2 --staleness 1", "2 is not a number from 0 to 1"),
        ("--cache 0.1", "add --staleness with at least 1"),
        ("--cache 0.1 --staleness none", "add --staleness with at least 1"),
    ],
)
def test_options_that_cannot_be_are_told_in_a_line(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
