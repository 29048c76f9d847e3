"""The map from ids to places, compared with a dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.embedding.idmap import IdMap, Ints
from torchweft.embedding.initial import mixed

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**33, 2**57, 2**62]
INT64 = st.integers(-(2**63), 2**63 - 1)


def array(numbers: list[int]) -> Ints:
    return np.array(numbers, np.int64)


def colliding(count: int, positions: int) -> list[int]:
    """Returns ids that begin at the last of the positions of a map, for every size up to it."""
    ids = torch.arange(-positions * count * 4, positions * count * 4)
    found = ids[mixed(ids).bitwise_and(positions - 1) == positions - 1][:count].tolist()
    assert len(found) == count
    return found


POOLS = [EXTREMES + list(range(-20, 20)), colliding(40, 1024)]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_it_does_what_a_dict_does(data: st.DataObject) -> None:
    pool = data.draw(st.sampled_from(POOLS) | st.lists(INT64, min_size=1, unique=True))
    some = st.lists(st.sampled_from(pool), unique=True)
    found, model, last = IdMap(), dict[int, int](), 0
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(some)
        if data.draw(st.booleans()):
            new = [number for number in chosen if number not in model]
            found.insert(array(new), np.arange(last, last + len(new)))
            model |= {number: last + place for place, number in enumerate(new)}
            last += len(new)
        else:
            old = [number for number in chosen if number in model]
            found.remove(array(old))
            model = {number: place for number, place in model.items() if number not in old}
        assert len(found) == len(model)
        assert found.find(array(pool)).tolist() == [model.get(number, -1) for number in pool]


def test_an_empty_map_finds_nothing() -> None:
    assert IdMap().find(array(EXTREMES)).tolist() == [-1] * len(EXTREMES)
    assert IdMap().find(array([])).tolist() == []


def test_ids_that_collide_keep_their_places_when_others_go() -> None:
    ids = array(colliding(60, 1024))
    found = IdMap()
    found.insert(ids, np.arange(60))
    found.remove(ids[::2])
    assert found.find(ids).tolist() == [-1 if k % 2 == 0 else k for k in range(60)]
    found.insert(ids[::2], np.arange(100, 130))
    assert found.find(ids[::2]).tolist() == list(range(100, 130))


def test_it_stays_small_when_ids_come_and_go() -> None:
    found = IdMap()
    for begin in range(0, 100_000, 100):
        found.insert(np.arange(begin, begin + 100), np.arange(100))
        found.remove(np.arange(begin, begin + 100))
    assert len(found) == 0
    assert len(found._ids) <= 1024


@pytest.mark.parametrize("step", [1, 2**20, 2**57])
def test_ids_in_regular_distances_do_not_collide(step: int) -> None:
    count = 64 if step == 2**57 else 4096
    homes = mixed(torch.arange(count) * step).bitwise_and(4 * count - 1)
    assert len(homes.unique()) > 0.7 * count
