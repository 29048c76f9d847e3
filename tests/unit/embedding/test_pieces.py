from __future__ import annotations

import itertools

import pytest
import torch

from torchweft.embedding import ColumnWise, RowWise, TableConfig, plan_tables
from torchweft.embedding.pieces import Piece, common, from_plain, pieces_of, within
from torchweft.embedding.plan import Place

STRIPES = [
    range(first, rows, step)
    for rows in (1, 7, 30)
    for step in (1, 2, 3, 6)
    for first in range(min(step, rows))
]


def test_ranges_have_in_common_what_their_sets_have() -> None:
    for one, other in itertools.product([*STRIPES, range(9, 30, 4)], repeat=2):
        found = common(one, other)
        assert list(found) == sorted({*one} & {*other})
        if found:
            assert list(one[slice(*within(found, one))]) == list(found)


def test_a_part_of_a_common_range_is_found_within_both() -> None:
    found = common(range(1, 100, 2), range(2, 100, 3))
    part = found[3:4]
    assert list(range(1, 100, 2)[slice(*within(part, range(1, 100, 2)))]) == list(part)


@pytest.mark.parametrize("place", [RowWise("a", "b", "c"), ColumnWise("b", "a")])
def test_the_pieces_of_a_table_cover_it_once(place: Place) -> None:
    plan = plan_tables([TableConfig("words", 10, 4)], ["a", "b", "c"], places={"words": place})
    counts = torch.zeros(10, 4)
    for held in pieces_of(plan.layout):
        columns = held.piece.columns
        counts[list(held.piece.rows), columns.start : columns.stop] += 1
    assert bool((counts == 1).all())


def test_a_piece_is_the_same_after_its_description_in_a_snapshot() -> None:
    piece = Piece("words", "worker3", range(1, 10, 3), range(4, 8))
    assert from_plain(piece.plain()) == piece
