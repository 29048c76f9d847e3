from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from data import (
    UNKNOWN,
    UnusableText,
    encode,
    load_corpus,
    make_vocabulary,
    read_text,
    split_held_out,
    split_words,
    to_columns,
    unigram_perplexity,
    without_repeats,
)


def load(path: Path | None, *, batch: int = 2, window: int = 4) -> object:
    return load_corpus(path, trainers=2, batch=batch, window=window, vocabulary_limit=50)


def test_words_and_runs_of_one_mark_are_cut_apart() -> None:
    assert split_words("A rule:\n-----\n(x**2), x_1.") == (
        ["A", "rule", ":", "-----", "(", "x", "**", "2", ")", ",", "x_1", "."]
    )


def test_a_paragraph_that_comes_again_is_kept_where_it_was_first() -> None:
    assert without_repeats("one\ntwo\n\nthree\n \none two\n\nfour") == "one\ntwo\n\nthree\n\nfour"


def test_every_tenth_stretch_is_held_out_and_nothing_is_lost() -> None:
    words = [str(number) for number in range(25_500)]
    training, held_out = split_held_out(words)
    assert held_out == words[9000:10_000] + words[19_000:20_000]
    assert sorted(training + held_out, key=int) == words


def test_a_short_text_is_held_out_by_its_tenth() -> None:
    training, held_out = split_held_out([str(number) for number in range(200)])
    assert held_out == [str(number) for number in range(180, 200)]
    assert len(training) == 180


def test_the_vocabulary_holds_the_most_frequent_words_that_occur_twice() -> None:
    words = "a a a b b c c d".split()
    assert make_vocabulary(words, limit=10) == [UNKNOWN, "a", "b", "c"]
    assert make_vocabulary(words, limit=3) == [UNKNOWN, "a", "b"]


def test_words_outside_the_vocabulary_become_the_unknown_word() -> None:
    assert encode(["b", "zebra", "a"], [UNKNOWN, "a", "b"]).tolist() == [2, 0, 1]


def test_columns_are_read_downwards() -> None:
    assert to_columns(torch.arange(7), 2).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_unigram_perplexity_equals_the_hand_computation() -> None:
    training = torch.tensor([[0, 1], [1, 1]])  # counts 1, 3, 0; add one: 2/7, 4/7, 1/7
    predicted = torch.tensor([[1], [2]])
    expected = 1 / math.sqrt(4 / 7 * 1 / 7)
    assert unigram_perplexity(training, predicted, 3) == pytest.approx(expected, rel=1e-12)


def test_the_text_of_python_itself_is_large_enough() -> None:
    corpus = load_corpus(None, trainers=2, batch=16, window=32, vocabulary_limit=4000)
    assert corpus.training.shape[1] == 32
    assert corpus.training.numel() > 50_000
    assert int(corpus.training.max()) < len(corpus.words) <= 4000
    assert 100 < corpus.unigram_perplexity() < 1000


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
