"""What a forward pass is expected to look up, and what becomes of wrong expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from torchweft.embedding import BadIds, Jagged, Tables
from torchweft.hybrid.passes import ModelPasses


@dataclass
class FakeLookup:
    """An expected lookup; its output is the sum of the ids."""

    flats: Mapping[str, Tensor]
    is_valid: bool = True

    def outputs(self) -> dict[str, Tensor]:
        return {name: ids.sum() for name, ids in self.flats.items()}


class FakeTables:
    """Notes which tables were pulled together, and which alone."""

    def __init__(self) -> None:
        self.reader = self
        self.pulled: list[list[str]] = []
        self.lookups: list[FakeLookup] = []

    def flats(self, inputs: Mapping[str, Jagged]) -> dict[str, Tensor]:
        for given in inputs.values():
            if given.ids.min() < 0:
                raise BadIds("an id is negative")
        return {name: given.ids for name, given in inputs.items()}

    def pull(self, each: Sequence[Mapping[str, Tensor]]) -> list[FakeLookup]:
        self.pulled.append([name for flats in each for name in flats])
        self.lookups = [FakeLookup(flats) for flats in each]
        return self.lookups

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        self.pulled.append(list(inputs))
        return {
            name: (given if isinstance(given, Tensor) else given.ids).sum()
            for name, given in inputs.items()
        }


class Batch(NamedTuple):
    words: Tensor
    fields: Tensor


class Model(nn.Module):
    """A model that looks up what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = FakeTables()
        self.passes = ModelPasses(cast("Tables", self.tables))
        self.register_forward_pre_hook(self.passes.begin, with_kwargs=True)

    def forward(self, batch: Any, *, days: Tensor | None = None, how: Any = None) -> list[Tensor]:
        if how is not None:
            return [self.look_up(*each) for each in how(batch)]
        assert days is not None
        return [
            self.look_up("words", batch.words),
            self.look_up("days", days),
            self.look_up("first", batch.fields[:, 0]),
            self.look_up("others", batch.fields[:, 1:3]),
        ]

    def look_up(self, table: str, ids: Any, offsets: Tensor | None = None) -> Tensor:
        return self.passes.look_up(table, Jagged(ids, offsets))

    def run(self, *args: Any, **kwargs: Any) -> list[float]:
        self.tables.pulled.clear()
        with self.passes.running():
            return [float(each) for each in self(*args, **kwargs)]


def draw(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 50, (rows,), generator=generator)
    return Batch(words, torch.randint(0, 50, (rows, 4), generator=generator))


def test_arguments_and_their_slices_are_pulled_together_whatever_the_size_of_the_batch() -> None:
    model = Model()
    for number, rows in enumerate([4, 4, 3, 6]):
        batch, days = draw(rows, number), torch.arange(rows)
        found = model.run(batch, days=days)
        slices = [batch.fields[:, 0], batch.fields[:, 1:3]]
        assert found == [float(each.sum()) for each in (batch.words, days, *slices)]
        names = ["words", "days", "first", "others"]
        assert model.tables.pulled == ([[name] for name in names] if not number else [names])


def lookups_of_two(batch: Batch) -> list[Any]:
    return [("words", batch.words), ("first", batch.fields[:, 0])]


def changed_in_place(batch: Batch) -> list[Any]:
    batch.words.add_(1)
    return lookups_of_two(batch)


@pytest.mark.parametrize(
    ("how", "alone"),
    [
        (lambda batch: lookups_of_two(batch)[::-1], []),
        (lambda batch: lookups_of_two(batch)[:1], []),
        (changed_in_place, ["words"]),
        (lambda batch: [("words", batch.words % 7)], ["words"]),
        (lambda batch: [*lookups_of_two(batch), ("words", batch.words)], ["words"]),
        (lambda batch: [("words", batch.words.int())], ["words"]),
        (lambda batch: [("words", batch.words, torch.tensor([0]))], ["words"]),
    ],
    ids=["another order", "fewer", "in place", "computed", "twice", "type", "offsets"],
)
def test_a_lookup_that_was_not_expected_so_is_a_call_of_its_own(how: Any, alone: Any) -> None:
    model = Model()
    for number in range(2):
        model.run(draw(4, number), how=lookups_of_two)
    batch = draw(4, 5)
    wanted = [float(each[1].sum()) for each in how(Batch(*(each.clone() for each in batch)))]
    assert model.run(batch, how=how) == wanted
    assert model.tables.pulled == [["words", "first"], *([alone] if alone else [])]


def test_ids_that_cannot_be_looked_up_are_an_error_only_if_the_model_uses_them() -> None:
    model = Model()
    model.run(draw(4), how=lambda batch: [*lookups_of_two(batch), ("pages", batch.fields[:, 3])])
    bad = draw(4)
    bad.words.fill_(-1)
    found = model.run(bad, how=lambda batch: [("first", batch.fields[:, 0].abs())])
    assert found == [float(bad.fields[:, 0].sum())]
    assert model.tables.pulled == [["first", "pages"]]


def test_a_single_table_and_a_module_that_is_called_directly_are_looked_up_alone() -> None:
    model = Model()
    for _ in range(2):
        model.run(draw(4), how=lambda batch: [("words", batch.words)])
        assert model.tables.pulled == [["words"]]
    for _ in range(2):
        model.run(draw(4), how=lookups_of_two)
    model.tables.pulled.clear()
    model(draw(4), how=lookups_of_two)
    assert model.tables.pulled == [["words"], ["first"]]
