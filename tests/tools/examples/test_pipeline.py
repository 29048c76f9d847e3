"""Tests the pipeline example: its options, its network and its batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from arguments import REPLICATED, SCHEDULES, make_schedule, parse_options
from charts import draw_timelines
from numerals import TESTED, Images, batches, load_images, padded
from residual import make_network
from training import Trial

from torchweft.ids import WorkerInfo
from torchweft.pipeline import cut_evenly
from torchweft.pipeline.recording import Recording
from torchweft.pipeline.schedules import Costs, Weights, predict


def test_every_schedule_can_be_chosen_with_its_defaults() -> None:
    stages = {"naive": 4, "gpipe": 4, "1f1b": 4, "interleaved": 8, "zbv": 8, "pipedream": 4}
    assert stages.keys() == SCHEDULES.keys()
    for name, count in stages.items():
        options = parse_options(["--schedule", name])
        table = make_schedule(options, name).table(options.workers)
        batches = 40 if name == "pipedream" else 8
        assert (table.n_workers, table.n_stages, table.n_microbatches) == (4, count, batches)


@pytest.mark.parametrize("name", REPLICATED)
def test_several_workers_may_hold_a_stage(name: str) -> None:
    options = parse_options(f"--schedule {name} --replicas 2,1,1 --weights 2bw".split())
    table = make_schedule(options, name).table(4)
    assert [table.replicas(stage) for stage in range(table.n_stages)] == [(0, 1), (2,), (3,)]
    if name == "pipedream":
        assert table.weights is Weights.DOUBLE_BUFFERED


def test_the_interleaved_schedule_may_have_more_stages() -> None:
    options = parse_options("--schedule interleaved --workers 2 --stages 6 --out x".split())
    assert make_schedule(options, "interleaved", options.stages).table(2).n_stages == 6
    assert options.out == Path("x")


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


def test_images_are_trained_on_or_tested_with() -> None:
    trained, tested = load_images()
    assert len(tested) == TESTED
    assert tested.pixels.shape == (TESTED, 1, 8, 8)
    assert len(trained) + len(tested) == 1797
    assert 0 <= float(trained.pixels.min()) < float(trained.pixels.max()) == 1


def test_an_epoch_has_each_image_at_most_once() -> None:
    images = Images(torch.arange(10.0), torch.arange(10))
    generator = torch.Generator().manual_seed(0)
    epochs = [list(batches(images, 4, generator)) for _ in range(2)]
    for epoch in epochs:
        digits = torch.cat([batch.digits for batch in epoch]).tolist()
        assert len(digits) == len(set(digits)) == 8
        assert all(torch.equal(batch.pixels, batch.digits.float()) for batch in epoch)
    assert not torch.equal(epochs[0][0].digits, epochs[1][0].digits)


@pytest.mark.parametrize(("count", "rows"), [(5, 5), (2, 6), (8, 8), (12, 12)])
def test_a_batch_is_filled_up(count: int, rows: int) -> None:
    images = torch.arange(5.0)
    found = padded(images, count)
    assert len(found) == rows
    assert torch.equal(found[:5], images)
    assert set(found.tolist()) == set(range(5))


def test_frozen_blocks_need_no_gradient() -> None:
    network = make_network(3, frozen=2)
    needs = [any(p.requires_grad for p in layer.parameters()) for layer in network]
    assert needs == [False, False, False, True, True]
    assert all(p.requires_grad for p in make_network(3).parameters())


def test_the_stages_of_the_default_network_have_as_many_blocks() -> None:
    assert [len(part) for part in cut_evenly(make_network(8), 4).sources] == [3, 2, 2, 3]
    assert make_network(2)(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.keeps("descriptors")  # matplotlib keeps its fonts open
def test_the_picture_shows_every_schedule(tmp_path: Path) -> None:
    options = parse_options([])
    trials = []
    for name in SCHEDULES:
        table = make_schedule(options, name).table(4)
        workers = [WorkerInfo(f"worker{n}", n) for n in range(4)]
        recording = Recording(lambda _, table=table: table, (), workers, lambda: None, list)
        recording.steps = (predict(table, Costs.uniform(table.n_stages)),)
        trials.append(Trial(name, recording, 1.0, (1, 1, 1, 1)))
    draw_timelines(trials, tmp_path / "all.png")
    draw_timelines(trials[:1], tmp_path / "one.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("all.png", "one.png")]
    assert sizes[0] > 2 * sizes[1] > 10_000
