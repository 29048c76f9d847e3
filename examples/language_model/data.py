"""Turns a text into columns of tokens, and computes the perplexity of a unigram model on it.

Repeated paragraphs are dropped: manuals repeat themselves, and held-out text that was also trained
on would flatter the model. The rest is split into words and punctuation, and every tenth stretch
is held out. The vocabulary is built from the training part alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

UNKNOWN = "<unk>"
UNKNOWN_TOKEN = 0
HELD_OUT_EVERY = 10
STRETCH_WORDS = 1000
EVALUATION_COLUMNS = 4
"""Columns of held-out text per trainer: few, so that the LSTM reads long stretches."""

# A run of one punctuation mark is one word: lines under headings are not language.
WORD = re.compile(r"\w+|([^\w\s])\1*")
BLANK_LINES = re.compile(r"\n\s*\n")


class UnusableText(ValueError):
    """The text cannot be trained on; the message is for the user."""


@dataclass(frozen=True)
class Corpus:
    """A text, ready to train on.

    Attributes:
        source: Name of the text's source, for display.
        words: The vocabulary; a token is a position in it.
        training: Tokens of the training part, shape ``(rows, trainers * batch)``.
        held_out: Tokens of the held-out part, shape ``(rows, trainers * EVALUATION_COLUMNS)``.
    """

    source: str
    words: list[str]
    training: Tensor
    held_out: Tensor

    def unigram_perplexity(self) -> float:
        """Returns the unigram model's perplexity on the held-out tokens that the LSTM predicts."""
        return unigram_perplexity(self.training, self.held_out[1:], len(self.words))


def load_corpus(
    path: Path | None, *, trainers: int, batch: int, window: int, vocabulary_limit: int
) -> Corpus:
    """Reads a text and lays it out for a number of trainers.

    Args:
        path: A UTF-8 text file; None for the text that every Python includes.
        trainers: Number of trainers that share the text.
        batch: Columns that each trainer reads side by side.
        window: Words of a column that a trainer reads in one step.
        vocabulary_limit: Maximum size of the vocabulary, including the unknown word.

    Raises:
        UnusableText: The file is missing, not text, empty, or too small.
    """
    source = "pydoc_data.topics" if path is None else str(path)
    words = split_words(without_repeats(read_text(path)))
    if not words:
        raise UnusableText(f"{source} is empty: there is no word in it")
    training_words, held_out_words = split_held_out(words)
    columns, held_out_columns = trainers * batch, trainers * EVALUATION_COLUMNS
    if len(training_words) < columns * (window + 1) or len(held_out_words) < 2 * held_out_columns:
        least = max(columns * (window + 1), 2 * HELD_OUT_EVERY * held_out_columns)
        raise UnusableText(
            f"{source} is too small: it has {len(words):,} words, and --trainers {trainers} "
            f"--batch {batch} --window {window} needs about {math.ceil(least / 0.9):,}"
        )
    vocabulary = make_vocabulary(training_words, vocabulary_limit)
    if len(vocabulary) < 2:
        raise UnusableText(f"{source} has no word that occurs twice, so there is nothing to learn")
    return Corpus(
        source=source,
        words=vocabulary,
        training=to_columns(encode(training_words, vocabulary), columns),
        held_out=to_columns(encode(held_out_words, vocabulary), held_out_columns),
    )


def read_text(path: Path | None) -> str:
    """Returns the text of a file, or of Python's own help topics if ``path`` is None."""
    if path is None:
        from pydoc_data.topics import topics  # half a megabyte: imported only if used

        return "\n\n".join(topics.values())
    if path.exists() and not path.is_file():
        raise UnusableText(f"{path} is not a file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UnusableText(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnusableText(f"{path} is not text: byte {error.start:,} is not UTF-8") from error
    if "\0" in text:
        raise UnusableText(f"{path} is not text: it contains zero bytes")
    return text


def without_repeats(text: str) -> str:
    """Returns the text with only the first occurrence of every paragraph."""
    first: dict[str, str] = {}
    for paragraph in BLANK_LINES.split(text):
        first.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(first.values())


def split_words(text: str) -> list[str]:
    """Splits a text into words and runs of the same punctuation mark."""
    return [match.group() for match in WORD.finditer(text)]


def split_held_out(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Holds out every tenth stretch of the text; returns the training and the held-out words."""
    stretch = max(1, min(STRETCH_WORDS, len(words) // HELD_OUT_EVERY))
    training: list[str] = []
    held_out: list[str] = []
    for number, start in enumerate(range(0, len(words), stretch), start=1):
        part = training if number % HELD_OUT_EVERY else held_out
        part.extend(words[start : start + stretch])
    return training, held_out


def make_vocabulary(words: Sequence[str], limit: int) -> list[str]:
    """Returns the unknown word and the most frequent words.

    Words that occur once become the unknown word, so that the model learns its contexts.
    """
    frequent = Counter(words).most_common(limit - 1)
    return [UNKNOWN, *(word for word, count in frequent if count > 1)]


def encode(words: Sequence[str], vocabulary: Sequence[str]) -> Tensor:
    """Returns the words' positions in the vocabulary, shape ``(words,)``."""
    token = {word: place for place, word in enumerate(vocabulary)}
    return torch.tensor([token.get(word, UNKNOWN_TOKEN) for word in words])


def to_columns(tokens: Tensor, columns: int) -> Tensor:
    """Lays a text out in columns of equal length, read downwards; drops the remainder."""
    rows = len(tokens) // columns
    return tokens[: rows * columns].view(columns, rows).t().contiguous()


def unigram_perplexity(training: Tensor, predicted: Tensor, vocabulary_size: int) -> float:
    """Returns the perplexity of a unigram model: add-one smoothed word frequencies."""
    counts = torch.bincount(training.flatten(), minlength=vocabulary_size).double() + 1
    log_probability = torch.log(counts / counts.sum())
    return math.exp(-log_probability[predicted.flatten()].mean().item())
