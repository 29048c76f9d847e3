from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch
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


def test_join_needs_trajectories_of_one_length() -> None:
    with pytest.raises(ConfigurationError, match="no trajectory"):
        join([])
    found = []
    for steps in (2, 3):
        with Observers("process", Environments(Walk, 1), walk_policy(), steps=steps) as observers:
            found += observers.round()
    with pytest.raises(ConfigurationError, match="given: observer0: 2, observer0: 3"):
        join(found)


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps=0"),
        ({"most_stale": -1}, "most_stale=-1"),
        ({"steps": 2.5}, "steps is 2.5, a float"),
        ({"where": []}, "names no workers"),
        ({"environments": "CartPole-v1"}, "environments is 'CartPole-v1', a str"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], text: str) -> None:
    given = {"where": "process", "environments": Environments(Walk), "agent": walk_policy()}
    with pytest.raises(ConfigurationError, match=text):
        Observers(**{**given, **options})


def test_environments_that_cannot_be() -> None:
    for options, text in (({"make": 3}, "make is 3"), ({"count": "2"}, "count is '2', a str")):
        with pytest.raises(TypeError, match=text):
            Environments(**{"make": Walk, **options})  # type: ignore[arg-type]


def test_an_agent_that_cannot_be_asked() -> None:
    with pytest.raises(ConfigurationError, match="agent is a object, which observers cannot ask"):
        Observers("process", Environments(Walk, 1), object())  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["process", "threads"])
def test_environments_go_on_with_another_agent(where: str) -> None:
    made: list[Walk] = []

    def make() -> Walk:
        made.append(Walk())
        return made[-1]

    first, second = walk_policy(), walk_policy()
    second.version = 5
    with Observers(where, Environments(make, 2), first, count=2, steps=1) as observers:
        before = observers.round()
        observers.follow(second)
        after = observers.round()
    assert [int(each.versions.max()) for each in (*before, *after)] == [0, 0, 5, 5]
    assert len(made) == 4
    for one, other in zip(before, after, strict=True):
        goes_on = ~one.ends[0]
        assert goes_on.any()
        assert torch.equal(one.last_observations, other.observations[0])
        assert not other.starts[0][goes_on].any()
