"""Tests the embedding example: its data, its measures of quality, its options and its picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from choices import RULES, parse_options
from clicks import EXPONENT, HELD_OUT, TABLES, Impressions, World, flat_ids
from drawing import draw_picture
from quality import ClickRates, auc, quality_of


@pytest.fixture(scope="module")
def world() -> World:
    return World(seed=0)


def test_a_place_has_the_same_impressions_and_another_one_has_others(world: World) -> None:
    first, again, other = world.draw(50, 1, 2), World(seed=0).draw(50, 1, 2), world.draw(50, 2, 1)
    for name, ids in flat_ids(first).items():
        assert torch.equal(ids, flat_ids(again)[name])
        assert not torch.equal(ids[:50], flat_ids(other)[name][:50])
    assert torch.equal(first.clicked, again.clicked)


def test_ids_are_rows_of_their_tables_and_follow_zipfs_law(world: World) -> None:
    found = flat_ids(world.draw(50_000, 0, 0))
    assert found.keys() == {config.name for config in TABLES}
    for config in TABLES:
        assert 0 <= int(found[config.name].min()) <= int(found[config.name].max()) < config.rows
        if config.name != "hour":
            counts = torch.bincount(found[config.name], minlength=config.rows)
            assert counts[0] / counts[9] == pytest.approx(10**EXPONENT, rel=0.15)


def test_clicks_have_the_planted_probability(world: World) -> None:
    found = world.draw(50_000, HELD_OUT, 0)
    error = 3 * float((found.chances * (1 - found.chances)).sum().sqrt())
    assert abs(float(found.clicked.sum() - found.chances.sum())) < error
    likely = found.chances > 0.8
    assert float(found.clicked[likely].mean()) > 0.8


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(10, (40,), generator=generator).double()  # many are equal
    clicked = torch.randint(2, (40,), generator=generator).double()
    above = scores[clicked > 0][:, None] - scores[clicked == 0][None]
    expected = ((above > 0).double() + (above == 0).double() / 2).mean()
    assert auc(scores, clicked) == pytest.approx(float(expected))
    assert auc(torch.zeros(40), clicked) == pytest.approx(0.5)
    assert quality_of(torch.zeros(40), clicked).log_loss == pytest.approx(math.log(2))


def test_the_baseline_predicts_from_the_rates_of_users_and_items() -> None:
    def impressions(users: list[int], items: list[int], clicked: list[float]) -> Impressions:
        ids = {"user": torch.tensor(users), "item": torch.tensor(items)}
        return Impressions(ids, torch.tensor(clicked), torch.tensor(clicked))

    rates = ClickRates()
    rates.count([impressions([0] * 40, list(range(40)), [1.0] * 40)])
    rates.count([impressions([1] * 40, list(range(40)), [0.0] * 40)])
    assert rates.rate == 0.5
    seen = rates.logits(impressions([0, 1, 2], [50, 50, 50], [0.0] * 3))
    # 40 clicks, or none, in 40 impressions, and 20 more with a rate of one half
    assert seen.tolist() == pytest.approx([math.log(50 / 10), math.log(10 / 50), 0.0], abs=1e-6)


def test_options_are_parsed() -> None:
    options = parse_options("--staleness none --optimizer rowwise --servers 3 --out x".split())
    assert (options.staleness, options.servers, options.out) == (None, 3, Path("x"))
    assert options.optimizer in RULES
    assert parse_options(["--staleness", "2"]).staleness == 2


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


@pytest.mark.keeps("descriptors")  # matplotlib keeps its fonts open
def test_the_picture_shows_losses_bytes_and_staleness(tmp_path: Path) -> None:
    step_bytes = {"user": {"pulled": 1e5, "pushed": 1e5}, "network": {"all-reduce": 5e4}}
    staleness = [{"user": {0: 3, 2: 1}}, {"user": {0: 4}}]
    sizes = []
    for number, counted in enumerate((staleness, staleness[1:])):
        path = tmp_path / f"{number}.png"
        losses = [0.7, 0.6, 0.5]
        draw_picture(losses, {"best": 0.4}, step_bytes, {"user": 1e7}, counted, path)
        sizes.append(path.stat().st_size)
    assert min(sizes) > 10_000
    assert sizes[0] != sizes[1]
