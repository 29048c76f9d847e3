from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from data import (
    UnusableText,
    load_corpus,
    read_text,
    split_held_out,
    unigram_perplexity,
)


def load(path: Path | None, *, batch: int = 2, window: int = 4) -> object:
    return load_corpus(path, trainers=2, batch=batch, window=window, vocabulary_limit=50)


def test_every_tenth_stretch_is_held_out_and_nothing_is_lost() -> None:
    words = [str(number) for number in range(25_500)]
    training, held_out = split_held_out(words)
    assert held_out == words[9000:10_000] + words[19_000:20_000]
    assert sorted(training + held_out, key=int) == words


def test_unigram_perplexity_equals_the_hand_computation() -> None:
    training = torch.tensor([[0, 1], [1, 1]])  # counts 1, 3, 0; add one: 2/7, 4/7, 1/7
    predicted = torch.tensor([[1], [2]])
    expected = 1 / math.sqrt(4 / 7 * 1 / 7)
    assert unigram_perplexity(training, predicted, 3) == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"a few words are too few", "too small: it has 6 words"),
        (b"\xff\xfe\x00", "is not text: byte 0"),
        (b"text with \x00 in it", "is not text: it contains zero bytes"),
        (" ".join(f"word{number}" for number in range(500)).encode(), "no word that occurs twice"),
    ],
)
def test_an_unusable_text_is_refused_in_one_line(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UnusableText, match=complaint) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableText, match="cannot be read: No such file"):
        read_text(tmp_path / "missing")
    with pytest.raises(UnusableText, match="is not a file"):
        read_text(tmp_path)


@pytest.mark.parametrize("words", [180, 220, 300])
def test_a_text_is_refused_or_has_a_step_to_train_and_words_to_test(
    tmp_path: Path, words: int
) -> None:
    path = tmp_path / "text"
    path.write_text("to and fro " * (words // 3) + "\n\n", encoding="utf-8")
    corpus = load_corpus(path, trainers=2, batch=2, window=4, vocabulary_limit=50)
    assert len(corpus.training) > 4
    assert len(corpus.held_out) >= 2
