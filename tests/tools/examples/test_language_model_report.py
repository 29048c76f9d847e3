from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data import Corpus
from model import Traffic
from report import (
    HeldOutPoint,
    History,
    activation_bytes,
    lstm_bytes,
    make_figures,
    write_figures,
)
from settings import Settings
from synchronous import StepReport

SETTINGS = Settings(batch=2, window=3, embedding=5, hidden=7)
CORPUS = Corpus("made up", ["<unk>", "a", "b"], torch.zeros(9, 4).long(), torch.ones(5, 8).long())


def make_history() -> History:
    history = History()
    for step in range(1, 5):
        traffic = [
            Traffic(600 * step, 490 * step, {"model": 1000 * step, "lstm": 90 * step})
            for _ in range(SETTINGS.trainers)
        ]
        history.add_step(StepReport([2.0 / step, 1.0 / step], traffic, seconds=0.5))
        if step % 2 == 0:
            history.add_held_out(10.0 / step)
    return history


@pytest.fixture
def figures() -> dict[str, Any]:
    return make_figures(SETTINGS, CORPUS, make_history(), wall_s=12.5)


def test_the_figures_have_the_documented_parts(figures: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_figures(figures, path)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert set(read["versions"]) == {"weft", "torch", "python"}
    assert read["settings"]["batch"] == 2
    assert read["text"] == {
        "source": "made up",
        "training_tokens": 36,
        "held_out_tokens": 32,
        "vocabulary": 3,
    }
    assert read["result"] == {
        "held_out_perplexity": 2.5,
        "unigram_perplexity": pytest.approx(39.0),
        "steps": 4,
        "training_s": 2.0,
        "wall_s": 12.5,
        "tokens_per_s": 4 * 2 * 2 * 3 / 2.0,
    }
    assert read["loss"] == [[2.0 / step, 1.0 / step] for step in range(1, 5)]
    assert read["held_out"] == [{"step": 2, "perplexity": 5.0}, {"step": 4, "perplexity": 2.5}]


def test_measured_bytes_stand_beside_the_formulas(figures: dict[str, Any]) -> None:
    assert figures["bytes_per_step_and_trainer"] == {
        "model_measured": 1000,
        "model_loss_on_server": 2 * 2 * 3 * 4 * (5 + 7),
        "model_logits_travel": 2 * 2 * 3 * 4 * (5 + 7 + 3),
        "lstm_gradients_measured": 90,
        "lstm_gradients": lstm_bytes(5, 7),
        "control_measured": 0,
    }
    assert activation_bytes(2, 3, 12) == 576


def test_a_history_goes_on_where_it_was_saved() -> None:
    history = make_history()
    again = History.from_state(history.state())
    assert again.losses == history.losses
    assert again.held_out == [HeldOutPoint(2, 5.0), HeldOutPoint(4, 2.5)]
    assert again.is_tested()
    again.add_step(StepReport([0.0, 0.0], [Traffic(5, 5, {"model": 10})] * 2, 0.5))
    assert not again.is_tested()
    assert again.bytes_per_step("model") == 10  # steps since then, not of the earlier run
