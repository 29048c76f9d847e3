"""Rows that a trainer keeps, against a model that knows every value and its age."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import examples
from torchweft.embedding import Cache
from torchweft.embedding.cache import Policy, RowCache
from torchweft.errors import ConfigurationError

KEYS, DIM = 14, 3


def values_of(keys: Tensor, born: Tensor) -> Tensor:
    """Returns rows that tell their key and their age."""
    return (keys * 1000 + born).double().unsqueeze(1).expand(-1, DIM).contiguous()


class Lookup:
    """A lookup that was sent, and its bound."""

    def __init__(self, cache: RowCache, keys: list[int], step: int, used: int, bound: int) -> None:
        self.cache, self.bound = cache, bound
        self.keys = torch.tensor(sorted(keys), dtype=torch.int64)
        self.asked = step
        is_ahead = used > step
        self.wanted = cache.reserve(self.keys, used - bound, step, may_wait=is_ahead)

    def arrive(self, keys: Tensor, age: int) -> None:
        born = torch.full_like(keys, age)
        self.cache.arrive(keys, values_of(keys, born), born, born + 500)

    def use(self, step: int, age: int) -> int:
        """Uses the rows in a step; returns how many were too old."""
        self.arrive(self.keys[self.wanted], age)
        late = self.keys[self.cache.too_old(self.keys, step - self.bound)]
        self.arrive(late, step)
        values, versions = self.cache.take(self.keys)
        born = versions - 500
        assert torch.equal(values, values_of(self.keys, born))
        assert bool((born >= step - self.bound).all())
        assert bool((born <= step).all())
        self.cache.release(self.keys)
        return len(late)

    def abandon(self) -> None:
        self.cache.abandon(self.keys, self.wanted)


keys_of_a_lookup = st.lists(st.integers(0, KEYS - 1), unique=True, max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("send"), keys_of_a_lookup),
        st.tuples(st.just("use"), st.integers(0, 2)),
        st.tuples(st.just("look up"), keys_of_a_lookup),
        st.tuples(st.sampled_from(["step", "cancel", "clear"]), st.none()),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", ["frequency", "recent"])
@settings(max_examples=examples(60), deadline=None)
@given(actions=actions, size=st.integers(0, 5), bound=st.integers(0, 3))
def test_no_lookup_sees_a_row_that_is_too_old_or_of_another_key(
    policy: Policy, actions: list[tuple[str, Any]], size: int, bound: int
) -> None:
    cache = RowCache(KEYS, size, DIM, torch.float64, policy)
    waiting: list[Lookup] = []
    step = 0
    for action, given_ in actions:
        if action == "send":
            waiting.append(Lookup(cache, given_, step, step + len(waiting), bound))
        elif action == "use" and waiting:
            lookup = waiting.pop(0)
            # A server may be some steps behind the trainer, so that its rows are older.
            lookup.use(step, max(0, lookup.asked - given_))
        elif action == "look up":
            Lookup(cache, given_, step, step, bound).use(step, step)
        elif action == "step":
            step += 1
        elif action == "cancel":
            while waiting:
                waiting.pop().abandon()
        elif action == "clear":
            cache.clear()
        held = len(torch.cat([each.keys for each in waiting]).unique()) if waiting else 0
        assert held <= len(cache) <= held + size
    while waiting:
        waiting.pop().abandon()
    assert len(cache) <= size


@settings(max_examples=examples(60), deadline=None)
@given(keys=st.lists(st.integers(0, KEYS - 1), max_size=60), size=st.integers(1, 5))
@pytest.mark.parametrize("policy", ["frequency", "recent"])
def test_the_rows_that_stay_are_those_of_the_policy(
    policy: Policy, keys: list[int], size: int
) -> None:
    cache = RowCache(KEYS, size, DIM, torch.float64, policy)
    kept: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for place, key in enumerate(keys):
        lookup = Lookup(cache, [key], 0, 0, 0)
        assert bool(lookup.wanted) == (key not in kept)
        lookup.use(0, 0)
        counts[key] += 1
        kept[key] = place
        if len(kept) > size:
            score = {
                each: (counts[each] if policy == "frequency" else 0, kept[each]) for each in kept
            }
            del kept[min(score, key=lambda each: score[each])]


def test_a_full_cache_drops_some_rows_at_once() -> None:
    cache = RowCache(400, 128, DIM, torch.float64, "recent")

    def is_missing(key: int) -> bool:
        lookup = Lookup(cache, [key], 0, 0, 0)
        lookup.use(0, 0)
        return bool(lookup.wanted)

    assert all(is_missing(key) for key in range(128))
    assert is_missing(200)
    assert len(cache) == 129
    assert is_missing(201)  # in place of 0, 1 and 2
    assert len(cache) == 127
    assert [is_missing(key) for key in (3, 200, 2, 1)] == [False, False, True, True]
    assert len(cache) == 129


def test_a_row_on_its_way_is_asked_for_once_and_again_if_it_was_lost() -> None:
    cache = RowCache(KEYS, 0, DIM, torch.float64)
    first, second = (Lookup(cache, [1, 2], 0, used, 5) for used in (1, 2))
    assert (first.wanted.tolist(), second.wanted.tolist()) == ([True] * 2, [False] * 2)
    # A lookup that is used now cannot wait for it.
    now = Lookup(cache, [2, 3], 0, 0, 5)
    assert now.wanted.tolist() == [True, True]
    assert now.use(0, 0) == 0
    first.abandon()
    assert second.use(0, 0) == 1  # Row 2 is here; row 1 is pulled at last.
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, "share of a cache is 1.5; it is from 0 to 1"),
        ({"share": "all"}, "share of a cache is 'all'"),
        ({"policy": "oldest"}, "policy of a cache is 'oldest'; use one of frequency, recent"),
        ({"steps": -1}, "steps of a cache is -1"),
        ({"steps": 1.5}, "steps of a cache is 1.5"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Cache(**options)
