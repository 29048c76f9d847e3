"""Tests the pipeline example: its options, its network and its batches."""

from __future__ import annotations

import pytest
import torch
from arguments import REPLICATED, make_schedule, parse_options
from numerals import padded

from torchweft.pipeline.schedules import Weights


@pytest.mark.parametrize("name", REPLICATED)
def test_several_workers_may_hold_a_stage(name: str) -> None:
    options = parse_options(f"--schedule {name} --replicas 2,1,1 --weights 2bw".split())
    table = make_schedule(options, name).table(4)
    assert [table.replicas(stage) for stage in range(table.n_stages)] == [(0, 1), (2,), (3,)]
    if name == "pipedream":
        assert table.weights is Weights.DOUBLE_BUFFERED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--schedule best", "invalid choice: 'best'"),
        ("--workers 0", "0 is not a whole number from 1 up"),
        ("--microbatches 7", "--batch 128 cannot be cut into 7 micro-batches"),
        ("--freeze 9", "--freeze 9: there are 8 blocks"),
        ("--shrink 1", "1 is not a number from 0 up and below 1"),
        ("--shrink 0.3 --schedule zbv", "--shrink is for gpipe and 1f1b"),
        ("--shrink 0.3 --freeze 1", "--shrink chooses frozen layers and replicas itself"),
        ("--stages 6", "--stages 6 is no multiple of 4 workers"),
        ("--stages 8", "1f1b has 4 stages on 4 workers, not 8"),
        ("--schedule zbv --blocks 4", "zbv has 8 stages on 4 workers, and the network 6 layers"),
        ("--schedule zbv --microbatches 4", "micro-batches"),
        ("--checkpoint sometimes", "invalid choice: 'sometimes'"),
        ("--schedule pipedream --checkpoint except_last", "pipedream has no last micro-batch"),
        ("--weights best", "invalid choice: 'best'"),
        ("--replicas 2,x", "x is not a whole number from 1 up"),
        ("--replicas 2,1", "pass replicas whose sum is 4"),
        ("--schedule zbv --replicas 2,1,1", "zbv has no replicas; gpipe, 1f1b, pipedream have"),
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


@pytest.mark.parametrize(("count", "rows"), [(5, 5), (2, 6), (8, 8), (12, 12)])
def test_a_batch_is_filled_up(count: int, rows: int) -> None:
    images = torch.arange(5.0)
    found = padded(images, count)
    assert len(found) == rows
    assert torch.equal(found[:5], images)
    assert set(found.tolist()) == set(range(5))
