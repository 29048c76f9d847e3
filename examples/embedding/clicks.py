"""Generates impressions with clicks: ids that follow Zipf's law, and a planted low-rank signal.

An impression has a user, an item, the words of a query and an hour. The probability of a click
comes from hidden vectors of few dimensions, so that a model can learn all of it, and its quality
can be compared with the best possible one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.embedding import Jagged, Normal, TableConfig

USERS, ITEMS, WORDS, HOURS = 100_000, 20_000, 50_000, 24
RANK, DIM = 4, 16
MOST_WORDS = 6
EXPONENT = 1.1
"""Of the k-th most frequent id, the frequency is as ``k ** -EXPONENT``."""
HELD_OUT = 999
"""The stream of the impressions that are not trained on."""
TABLES = (
    TableConfig("user", USERS, DIM, "none", initial=Normal(std=0.1)),
    TableConfig("item", ITEMS, DIM, "none", initial=Normal(std=0.1)),
    TableConfig("word", WORDS, DIM, "mean", initial=Normal(std=0.1)),
    TableConfig("hour", HOURS, DIM, "none", initial=Normal(std=0.1)),
)


class Impressions(NamedTuple):
    """Some impressions.

    Attributes:
        ids: The ids to look up in each table; ``(n,)`` or, of words, n bags.
        clicked: 1 where there was a click, ``(n,)``.
        chances: The probability of a click, which no model sees, ``(n,)``.
    """

    ids: dict[str, Tensor | Jagged]
    clicked: Tensor
    chances: Tensor


class World:
    """Draws impressions; two of one seed draw the same.

    Args:
        seed: Where the hidden vectors come from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        # Products of two vectors have variance 1.
        vectors = torch.randn(USERS + ITEMS + WORDS, RANK, generator=generator) / RANK**0.25
        self._users, self._items, self._words = vectors.split([USERS, ITEMS, WORDS])
        self._popularity = torch.randn(ITEMS, generator=generator)
        self._shares = {rows: _zipf(rows) for rows in (USERS, ITEMS, WORDS)}

    def draw(self, count: int, stream: int, step: int) -> Impressions:
        """Returns impressions.

        Args:
            count: How many.
            stream: Below 1000: the number of the trainer, or ``HELD_OUT``.
            step: Below 1,000,000: the number of the batch. The same has the same impressions.
        """
        seed = (1000 * self._seed + stream) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        users, items = (self._ids(rows, count, generator) for rows in (USERS, ITEMS))
        hours = torch.randint(HOURS, (count,), generator=generator)
        lengths = torch.randint(1, MOST_WORDS + 1, (count,), generator=generator)
        words = self._ids(WORDS, int(lengths.sum()), generator)
        offsets = lengths.cumsum(0) - lengths
        asked = torch.nn.functional.embedding_bag(words, self._words, offsets, mode="mean")
        liked = self._items[items]
        scores = (
            1.5 * (self._users[users] * liked).sum(1)
            + 1.5 * (asked * liked).sum(1)
            + 0.5 * self._popularity[items]
            + 0.5 * torch.sin(hours * (2 * math.pi / HOURS))
            - 1.0
        )
        chances = scores.sigmoid()
        clicked = torch.bernoulli(chances, generator=generator)
        ids = {"user": users, "item": items, "word": Jagged(words, offsets), "hour": hours}
        return Impressions(ids, clicked, chances)

    def _ids(self, rows: int, count: int, generator: torch.Generator) -> Tensor:
        places = torch.rand(count, generator=generator, dtype=torch.float64)
        return torch.searchsorted(self._shares[rows], places).clamp_(max=rows - 1)


def _zipf(rows: int) -> Tensor:
    """Returns the cumulative frequencies of ids."""
    shares = torch.arange(1, rows + 1, dtype=torch.float64).pow(-EXPONENT).cumsum(0)
    return shares / shares[-1]


def flat_ids(impressions: Impressions) -> dict[str, Tensor]:
    """Returns the ids of each table without the bags that they are in."""
    return {
        name: given.ids if isinstance(given, Jagged) else given
        for name, given in impressions.ids.items()
    }
