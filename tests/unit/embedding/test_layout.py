"""Stacks of tables, and the pieces of tables on servers."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchweft.embedding import ColumnWise, RowWise, TableConfig, TableWise, plan_tables
from torchweft.embedding.configs import Place
from torchweft.embedding.layout import Piece, common, from_plain, lay_out, pieces_of, within

A, B = TableConfig("a", 7, 4), TableConfig("b", 4, 4)


def test_types_dimensions_and_maxima_are_stacks_of_their_own() -> None:
    tables = [
        A,
        TableConfig("wide", 7, 5),
        TableConfig("double", 7, 4, dtype=torch.float64),
        TableConfig("max", 7, 4, "max"),
        TableConfig("mean", 7, 4, "mean"),
    ]
    shards = {each.name: TableWise("x").shards(each) for each in tables}
    members = [
        [member.config.name for member in stack.members] for stack in lay_out(tables, shards).stacks
    ]
    assert members == [["a", "mean"], ["wide"], ["double"], ["max"]]


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
