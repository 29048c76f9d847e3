from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.on_gpu import on_gpu
from torchweft.errors import ConfigurationError
from torchweft.rl import BadPriority, ColumnsMismatch, NotEnough, ReplayBuffer, ReplayError, SumTree


def rows(*numbers: int) -> dict[str, Any]:
    return {"number": torch.tensor(numbers), "pair": torch.tensor(numbers)[:, None] * torch.ones(2)}


@given(st.data(), st.integers(1, 33))
def test_the_tree_finds_what_a_search_through_all_sums_finds(data: Any, capacity: int) -> None:
    tree, weights = SumTree(capacity), np.zeros(capacity)
    place = st.integers(0, capacity - 1)
    weight = st.integers(0, 8).map(float)  # so that all sums are exact
    for _ in range(data.draw(st.integers(1, 4))):
        changes = data.draw(st.lists(st.tuples(place, weight), max_size=6))
        places = np.array([each for each, _ in changes], np.int64)
        tree.set(places, np.array([each for _, each in changes]))
        for each, value in changes:
            weights[each] = value
    assert tree.total == weights.sum()
    if tree.total:
        total = int(tree.total)
        parts = (np.arange(2 * total) + 0.5) / (2 * total)
        expected = np.searchsorted(np.cumsum(weights), parts * total, side="right")
        assert tree.find(parts).tolist() == expected.tolist()


@pytest.mark.parametrize("power", [0.0, 0.6])
def test_the_newest_rows_are_kept(power: float) -> None:
    buffer = ReplayBuffer(5, priority_power=power)
    assert buffer.add(rows(0, 1, 2)) == 3
    assert buffer.add(rows(3, 4, 5, 6)) == 7
    assert len(buffer) == buffer.size() == 5
    found = buffer.sample(200)
    assert set(found.columns["number"].tolist()) == {2, 3, 4, 5, 6}
    assert torch.equal(found.rows, found.columns["number"])
    assert torch.equal(found.columns["pair"], found.columns["number"][:, None] * torch.ones(2))
    assert (found.weights == 1).all()
    assert buffer.add(rows(*range(7, 30))) == 30
    assert set(buffer.sample(200).columns["number"].tolist()) == set(range(25, 30))


def test_rows_are_drawn_by_priority_and_weighed_against_it() -> None:
    buffer = ReplayBuffer(8, priority_power=0.5, weight_power=1.0)
    buffer.add(rows(0, 1, 2, 3))
    buffer.set_priorities(torch.arange(4), torch.tensor([0.0, 1.0, 4.0, 25.0]))
    found = buffer.sample(8000)
    counts = torch.bincount(found.rows, minlength=4)
    assert counts.tolist() == [0, 1000, 2000, 5000]  # a draw from each of equal parts
    assert torch.allclose(found.weights, 1 / torch.tensor([1.0, 1.0, 2.0, 5.0])[found.rows])
    buffer.add(rows(4))  # has the highest priority so far
    counts = torch.bincount(buffer.sample(13_000).rows, minlength=5)
    assert counts.tolist() == [0, 1000, 2000, 5000, 5000]


def test_priorities_of_overwritten_rows_are_left_out() -> None:
    buffer = ReplayBuffer(2, priority_power=1.0)
    buffer.add(rows(0, 1))
    buffer.add(rows(2))
    assert buffer.set_priorities(torch.tensor([0, 1, 2]), torch.tensor([100.0, 0.0, 1.0])) == 1
    assert set(buffer.sample(50).rows.tolist()) == {2}
    assert buffer.set_priorities(torch.tensor([99]), torch.tensor([1.0])) == 1


@pytest.mark.parametrize("power", [0.0, 0.6])
def test_a_snapshot_goes_on_alike(power: float) -> None:
    one, other = (ReplayBuffer(6, priority_power=power, seed=3) for _ in range(2))
    one.add(rows(*range(9)))
    if power:
        one.set_priorities(torch.tensor([5, 6]), torch.tensor([3.0, 0.5]))
    one.sample(3)
    other.load_state_dict(one.state_dict())
    for buffer in (one, other):
        buffer.add(rows(9, 10))
    samples = [buffer.sample(20) for buffer in (one, other)]
    assert torch.equal(samples[0].rows, samples[1].rows)
    assert torch.equal(samples[0].weights, samples[1].weights)
    assert torch.equal(samples[0].columns["pair"], samples[1].columns["pair"])


@pytest.mark.parametrize(
    ("power", "capacity", "text"),
    [
        (0.6, 20, "with 6 of 9 rows is of a buffer of another capacity than 20"),
        (0.6, 4, "of another capacity than 4"),
        (0.0, 6, "samples by priority, and this one samples uniformly"),
    ],
)
def test_a_snapshot_of_another_buffer_changes_nothing(
    power: float, capacity: int, text: str
) -> None:
    """Memory without rows would be sampled."""
    one = ReplayBuffer(6, priority_power=0.6)
    one.add(rows(*range(9)))
    other = ReplayBuffer(capacity, priority_power=power)
    other.add(rows(0))
    with pytest.raises(ReplayError, match=text):
        other.load_state_dict(one.state_dict())
    assert set(other.sample(9).rows.tolist()) == {0}


def test_rows_that_do_not_fit_change_nothing() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(rows(0, 1))
    bad = [
        ({"number": torch.tensor([1])}, "pair"),
        ({**rows(1), "pair": torch.ones(1, 3)}, "pair"),
        ({**rows(1), "number": torch.ones(1)}, "number"),
        ({**rows(1), "pair": torch.ones(2, 2)}, "pair"),
    ]
    for columns, column in bad:
        with pytest.raises(ColumnsMismatch) as caught:
            buffer.add(columns)
        assert caught.value.column == column
    with pytest.raises(ColumnsMismatch):
        ReplayBuffer(4).add({})
    assert len(buffer) == 2


def test_bad_priorities_change_nothing() -> None:
    buffer = ReplayBuffer(4, priority_power=1.0)
    buffer.add(rows(0, 1))
    for priorities, position in (([1.0, -1.0], 1), ([float("nan"), 1.0], 0), ([1.0], 1)):
        with pytest.raises(BadPriority) as caught:
            buffer.set_priorities(torch.arange(2), torch.tensor(priorities))
        assert caught.value.position == position
    steep = ReplayBuffer(4, priority_power=2.0)
    steep.add(rows(0, 1))
    with pytest.raises(
        BadPriority, match=r"1e\+300 at position 1 must be finite, also to the power"
    ):
        steep.set_priorities(torch.arange(2), torch.tensor([1.0, 1e300], dtype=torch.float64))
    with pytest.raises(TypeError, match="the integers of Sample"):
        steep.set_priorities(torch.ones(2), torch.ones(2))
    assert torch.bincount(buffer.sample(10).rows).tolist() == [5, 5]
    with pytest.raises(ConfigurationError, match="samples uniformly"):
        ReplayBuffer(4).set_priorities(torch.arange(1), torch.ones(1))
    with pytest.raises(ConfigurationError, match="capacity=0"):
        ReplayBuffer(0)


def test_priorities_may_be_on_a_gpu() -> None:
    buffer = ReplayBuffer(3, priority_power=1.0)
    buffer.add(rows(0, 1, 2))
    priorities = on_gpu(torch.tensor([0.0, 0.0, 2.0], requires_grad=True))
    assert buffer.set_priorities(on_gpu(torch.arange(3)), priorities) == 0
    assert buffer.sample(5).columns["number"].tolist() == [2] * 5


def test_values_that_are_no_rows() -> None:
    buffer = ReplayBuffer(4, priority_power=1.0)
    buffer.add(rows(0, 1))
    for columns, text in (
        ([1], "columns is a list"),
        ({**rows(2), "number": np.ones(1)}, "column 'number' is a ndarray"),
        ({**rows(2), "number": torch.tensor(1)}, "'number' is a tensor without dimensions"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            buffer.add(columns)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="count=-1"):
        buffer.sample(-1)
    with pytest.raises(TypeError, match="priorities is a list"):
        buffer.set_priorities(torch.arange(2), [1.0, 1.0])  # type: ignore[arg-type]
    with pytest.raises(BadPriority, match=r"rows of shape \[\]"):
        buffer.set_priorities(torch.tensor(1), torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"capacity is 2\.5"):
        ReplayBuffer(2.5)  # type: ignore[arg-type]


def test_too_few_rows() -> None:
    buffer = ReplayBuffer(4, priority_power=1.0)
    with pytest.raises(NotEnough, match="0 rows are stored; 1 must"):
        buffer.sample(2)
    buffer.add(rows(0, 1))
    with pytest.raises(NotEnough) as caught:
        buffer.sample(2, at_least=3)
    assert (caught.value.stored, caught.value.wanted) == (2, 3)
    buffer.set_priorities(torch.arange(2), torch.zeros(2))
    with pytest.raises(NotEnough, match="all with priority 0"):
        buffer.sample(2)
