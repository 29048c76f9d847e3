from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
from torch import Tensor

from tests.rl_environments import Walk, walk_policy
from torchweft.errors import ConfigurationError
from torchweft.rl import Decision, Environments, Observers, TooStale, join


class Updated:
    """A policy that is updated meanwhile, by another thread as it were.

    Args:
        versions: What the learner is told, one after the other.
    """

    def __init__(self, versions: Iterator[int]) -> None:
        self._versions = versions
        self._policy = walk_policy()

    @property
    def version(self) -> int:
        return next(self._versions)

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        return self._policy.act(observations, environments)


def test_a_round_of_which_all_is_too_old_is_followed_by_another() -> None:
    policy = Updated(chain([9, 2], repeat(1)))
    with Observers(
        "process", Environments(Walk, 2), policy, count=2, steps=3, most_stale=1
    ) as observers:
        found = observers.round()
        assert [each.number for each in found] == [1, 1]
        assert observers.refused == 2
        assert join(found).steps == 2 * 2 * 3


def test_rounds_end_if_everything_is_always_too_old() -> None:
    with (
        Observers(
            "process", Environments(Walk, 2), Updated(repeat(2)), most_stale=1, steps=3,
            time_limit_s=0.05,
        ) as observers,
        pytest.raises(TooStale, match="most_stale=1 updates") as caught,
    ):  # fmt: skip
        observers.round()
    assert caught.value.refused == observers.refused >= 1
    assert caught.value.most_stale == 1


def test_closed_observers_say_so() -> None:
    with Observers("process", Environments(Walk, 2), walk_policy(), steps=2) as observers:
        trajectories = observers.stream()
        next(trajectories)
    uses: list[Callable[[], object]] = [
        observers.round,
        lambda: next(trajectories),
        lambda: next(observers.stream()),
        observers.take_back,
        lambda: observers.replace(0),
        lambda: observers.follow(walk_policy()),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError, match="these observers are closed"):
            use()
