from __future__ import annotations

from pathlib import Path

import pytest
from data import (
    load_corpus,
)


def test_no_stretch_of_held_out_text_was_trained_on() -> None:
    corpus = load_corpus(None, trainers=1, batch=1, window=32, vocabulary_limit=4000)
    length = 40
    text = corpus.training.flatten().tolist()
    trained = {tuple(text[start : start + length]) for start in range(len(text) - length)}
    tested = [column.tolist() for column in corpus.held_out.t()]
    stretches = [
        tuple(column[start : start + length])
        for column in tested
        for start in range(0, len(column) - length, length)
    ]
    repeated = sum(stretch in trained for stretch in stretches)
    assert repeated < len(stretches) / 50


@pytest.mark.parametrize("words", [180, 220, 300])
def test_a_text_is_refused_or_has_a_step_to_train_and_words_to_test(
    tmp_path: Path, words: int
) -> None:
    path = tmp_path / "text"
    path.write_text("to and fro " * (words // 3) + "\n\n", encoding="utf-8")
    corpus = load_corpus(path, trainers=2, batch=2, window=4, vocabulary_limit=50)
    assert len(corpus.training) > 4
    assert len(corpus.held_out) >= 2
