"""Counts the rows that a cache and a look-ahead save on a text: ``... TEXT [TEXT ...]``.

A text is one file, with a sentence in each line and blanks between words, such as the validation
and test parts of WikiText-2. Its words, with the end of each line as one, are cut into 20 rows; a
batch is the next 35 words of each row. All shares are of rows, each once for a batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchweft as weft
from torchweft.embedding import SGD, Cache, TableConfig, Tables, plan_tables

ROWS, LENGTH, DIM = 20, 35, 64
LINE_END = "<eos>"
AHEAD = 10
BOUNDS = (1, 2, 4, 8, 16, 32)


def read_batches(paths: Iterable[Path]) -> tuple[int, list[Tensor]]:
    """Returns the number of different words, and the batches of ids ``(20, 35)``."""
    numbers: dict[str, int] = {}
    ids = [
        numbers.setdefault(word, len(numbers))
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
        for word in [*line.split(), LINE_END]
    ]
    width = len(ids) // ROWS
    table = torch.tensor(ids[: width * ROWS]).view(ROWS, width)
    return len(numbers), [
        table[:, begin : begin + LENGTH].contiguous()
        for begin in range(0, width - LENGTH + 1, LENGTH)
    ]


def pulled_share(tables: Tables) -> float:
    """Returns the share of the rows that were needed and not in the cache."""
    moved = tables.traffic()["word"]
    return 1 - moved.hits / moved.rows


def make_tables(server: str, words: int, name: str, **options: Any) -> Tables:
    """Returns one table of words on a server."""
    plan = plan_tables([TableConfig("word", words, DIM, "none")], [server])
    return Tables(plan, name=name, **options)


def hits_by_pass(server: str, words: int, batches: Sequence[Tensor], cache: Cache) -> list[float]:
    """Returns the share of hits in two passes over a text; nothing is trained."""
    tables = make_tables(server, words, "passes", cache=cache)
    found, before = [], (0, 0)
    for _ in range(2):
        for batch in batches:
            tables({"word": batch})
        moved = tables.traffic()["word"]
        found.append((moved.hits - before[0]) / (moved.rows - before[1]))
        before = moved.hits, moved.rows
    tables.close()
    return found


def hits_of_most_frequent(words: int, batches: Sequence[Tensor], share: float) -> float:
    """Returns the hits of a cache with the rows that most batches need, chosen beforehand.

    It knows the whole text, and has its rows before the first batch. So it is a bound for caches of
    this size that keep the same rows all the time, and no policy that a program could use.
    """
    counts = torch.zeros(words, dtype=torch.int64)
    for batch in batches:
        counts[torch.unique(batch)] += 1
    kept = counts.sort(descending=True).values[: int(share * words)]
    return float(kept.sum() / counts.sum())


def share_left_by_look_ahead(
    server: str, words: int, batches: Sequence[Tensor], ahead: int
) -> float:
    """Returns the share of rows that a stream pulls, which keeps only rows of coming batches."""
    tables = make_tables(server, words, "ahead", cache=Cache(0))
    with tables.stream(({"word": batch} for batch in batches), ahead) as stream:
        for _ in stream:
            pass
    found = pulled_share(tables)
    tables.close()
    return found


def hits_in_training(server: str, words: int, batches: Sequence[Tensor], bound: int) -> float:
    """Returns the share of hits in training with a bound of the staleness."""
    tables = make_tables(server, words, "training", cache=Cache(0.1), staleness=bound)
    optimizer = tables.optimizer(SGD(lr=0.01))
    for batch in batches:
        optimizer.zero_grad()
        tables({"word": batch})["word"].square().sum().backward()
        optimizer.step()
    assert max(tables.staleness()) <= bound
    found = 1 - pulled_share(tables)
    tables.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints all shares; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding.text_cache")
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    words, batches = read_batches(parser.parse_args(arguments).texts)
    print(f"{words:,} words, {len(batches):,} batches of {ROWS} x {LENGTH}")
    with weft.cluster(workers=1) as cluster:
        (server,) = cluster.names
        given = server, words, batches
        chosen = hits_of_most_frequent(words, batches, 0.1)
        print(f"the most frequent 10%, chosen beforehand: hits {chosen:.3f}")
        for name, cache in (("frequency", Cache(0.1)), ("recent", Cache(0.1, "recent"))):
            first, second = hits_by_pass(*given, cache)
            print(f"cache of 10%, {name}: hits {first:.3f}, in a second pass {second:.3f}")
        print(f"look-ahead of {AHEAD}: leaves {share_left_by_look_ahead(*given, AHEAD):.3f}")
        for bound in BOUNDS:
            print(f"training, staleness={bound}: hits {hits_in_training(*given, bound):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
