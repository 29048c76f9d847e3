from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.on_gpu import on_gpu
from tests.rl_environments import Walk, Walks, walk_policy
from torchweft.errors import ConfigurationError
from torchweft.rl import (
    Decision,
    Environments,
    LocalPolicy,
    NoObservers,
    Observer,
    Observers,
    Trajectory,
    UnservedSpace,
    WrongObservations,
)


def observed(*, steps: int = 20, rounds: int = 2, **options: Any) -> Trajectory:
    """Trajectories of several calls in a row, as one."""
    policy = walk_policy(rows=4)
    observer = Observer(1, Environments(Walk, 4, seed=10, **options), policy)
    return [observer.observe(steps) for _ in range(rounds)][-1]


def equal(one: Trajectory, other: Trajectory) -> bool:
    for name, value in vars(one).items():
        found = getattr(other, name)
        if isinstance(value, Tensor):
            assert torch.equal(value, found), name
        elif isinstance(value, dict):
            assert all(torch.equal(value[key], found[key]) for key in value), name
        else:
            assert value == found, name
    return True


def by_hand(number: int, steps: int) -> list[tuple[Any, ...]]:
    """One environment, alone: observation, action, reward, ends, and what followed."""
    policy = walk_policy(rows=4)
    walk = Walk()
    seen, starts, rows = walk.reset(number)[0], True, []
    for step in range(steps):
        who = torch.tensor([[number, step, starts]])
        decision = policy.act(torch.from_numpy(seen)[None], who)
        action = int(decision.actions)
        after, reward, terminated, truncated, _ = walk.step(action)
        logs = decision.outputs["logs"].item()
        rows.append((seen.tolist(), action, reward, terminated, truncated, starts, logs, after))
        starts = terminated or truncated
        seen = walk.reset()[0] if starts else after
    return rows


def test_each_environment_does_as_if_it_were_alone() -> None:
    policy = walk_policy(rows=4)
    observer = Observer(1, Environments(Walk, 4, seed=10), policy, "first")
    found = [observer.observe(25), observer.observe(15)]
    assert [each.number for each in found] == [0, 1]
    assert found[0].observer == "first"
    assert found[0].environments.tolist() == [14, 15, 16, 17]
    ends = 0
    for column in range(4):
        expected = by_hand(14 + column, 40)
        for step, row in enumerate(expected):
            part, at = (found[0], step) if step < 25 else (found[1], step - 25)
            assert part.observations[at, column].tolist() == row[0]
            assert part.actions[at, column] == row[1]
            assert part.rewards[at, column].item() == pytest.approx(row[2])
            assert bool(part.terminated[at, column]) is row[3]
            assert bool(part.truncated[at, column]) is row[4]
            assert bool(part.starts[at, column]) is row[5]
            assert part.outputs["logs"][at, column].item() == row[6]
            assert part.next_observations()[at, column].tolist() == row[7].tolist()
            ends += row[3] or row[4]
    assert sum(len(each.episodes) for each in found) == ends > 10
    both = [bool(each.terminated.any()) and bool(each.truncated.any()) for each in found]
    assert both == [True, True]


def test_a_native_vector_has_steps_that_only_reset() -> None:
    policy = walk_policy()
    observer = Observer(0, Environments(Walks, 4, halves=2, vectorized=True), policy)
    observer.observe(3)
    found = observer.observe(30)
    assert torch.equal(~found.valid[1:], found.ends[:-1])
    assert found.steps == 120 - int((~found.valid).sum()) < 120
    assert torch.equal(found.starts[1:], ~found.valid[:-1])
    assert not found.final_places.numel()  # The next observation is the last of the episode.
    assert (found.rewards[~found.valid] == 0).all()
    rows = found.transitions()
    assert all(len(each) == found.steps for each in rows.values())
    lengths = [each.steps for each in found.episodes]
    assert max(lengths) == Walk.limit


def test_transitions_of_a_truncated_episode_go_on_from_its_last_observation() -> None:
    found = observed()
    rows = found.transitions()
    cut = found.truncated.flatten()
    assert cut.any()
    assert (rows["next_observations"][cut][:, 1] == Walk.limit).all()


def test_an_environment_whose_observations_change_shape_is_named() -> None:
    class Changing(Walk):
        def _seen(self) -> Any:
            return super()._seen()[: 2 if self._steps == 3 else 3]

    class OneChanges(Walk):
        made = 0

        def __new__(cls) -> Any:
            OneChanges.made += 1
            return Changing() if OneChanges.made == 2 else Walk()

    observer = Observer(0, Environments(OneChanges, 3, seed=20), walk_policy(), "west")
    expected = r"observer 'west': environment 21 returned .* shape \[2\]; its space has \[3\]"
    with pytest.raises(WrongObservations, match=expected) as caught:
        observer.observe(7)
    assert (caught.value.observer, caught.value.environments) == ("west", (21,))
    assert (caught.value.expected, caught.value.found) == ((3,), (2,))


class OneArray(Walk):
    """Counts its steps, in the same array again and again."""

    observation_space = Walk.observation_space._replace(shape=(1,))

    def __init__(self) -> None:
        self._array = np.zeros(1, np.float32)

    def reset(self, seed: int | None = None) -> Any:
        self._array[:] = 0
        return self._array, {}

    def step(self, action: int) -> Any:
        self._array += 1
        return self._array, 1.0, bool(self._array[0] == 3), False, {}


class Still(LocalPolicy):
    def decide(self, observations: Tensor, draws: Tensor, states: Tensor) -> Any:
        return torch.zeros(len(observations), dtype=torch.int64), {}, states


def still(*shape: int) -> Still:
    return Still(nn.Linear(1, 1), shape)


def test_an_environment_may_return_the_same_array_again_and_again() -> None:
    found = Observer(0, Environments(OneArray, 2), still(1)).observe(5)
    assert found.observations[:, 1, 0].tolist() == [0, 1, 2, 0, 1]
    assert found.next_observations()[:, 1, 0].tolist() == [1, 2, 3, 1, 2]
    assert found.final_observations.tolist() == [[3], [3]]


@pytest.mark.parametrize("reward", [None, "much", [1.0, 2.0]])
def test_a_reward_that_is_no_number_names_the_environment(reward: Any) -> None:
    class Odd(OneArray):
        def step(self, action: int) -> Any:
            return self._array, reward, False, False, {}

    with pytest.raises(
        ConfigurationError, match=r"environment 6 returned as reward .*; it must be"
    ):
        Observer(2, Environments(Odd, 3), still(1)).observe(1)


def test_an_environment_that_cannot_be_closed_keeps_no_other_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[int] = []

    class Unclosed(OneArray):
        def close(self) -> None:
            closed.append(len(closed))
            raise OSError("the device is busy")

    with Observers("process", Environments(Unclosed, 2), still(1), count=2, steps=1) as observers:
        observers.round()
    assert len(closed) == 4
    assert caplog.text.count("failed when it was closed") == 4


def test_after_an_error_episodes_begin_anew() -> None:
    policy = walk_policy(rows=4)
    observer = Observer(0, Environments(Walk, 4), policy)
    first = observer.observe(5)
    policy.decide = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        observer.observe(5)
    del policy.decide
    again = observer.observe(5)
    assert again.starts[0].all()
    assert torch.equal(again.observations[0], first.observations[0])


def test_a_native_vector_with_another_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walks, "metadata", {"autoreset_mode": "SameStep"})
    with pytest.raises(ConfigurationError, match=r"'SameStep'.*NEXT_STEP"):
        Observer(0, Environments(Walks, 4, vectorized=True), walk_policy())


@pytest.mark.parametrize("size", [3, None])
def test_a_native_vector_of_another_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    def make(count: int) -> Any:
        made = Walks(count)
        made.num_envs = size  # type: ignore[assignment]
        return made

    with pytest.raises(ConfigurationError, match=r"has (3|no number) of .* a native vector of 4"):
        Observer(0, Environments(make, 4, vectorized=True), walk_policy())


class Mapping(NamedTuple):
    """A space of several arrays, as gymnasium's ``Dict``."""

    shape: None = None
    dtype: None = None


class Texts(NamedTuple):
    shape: tuple[int, ...] = (2,)
    dtype: Any = str


@pytest.mark.parametrize("kind", ["observation", "action"])
@pytest.mark.parametrize("space", [Mapping(), Texts()])
def test_spaces_that_are_not_served_are_told_before_the_first_step(kind: str, space: Any) -> None:
    class Unserved(Walk):
        def step(self, action: int) -> Any:
            raise AssertionError("it took a step")

    setattr(Unserved, f"{kind}_space", space)
    expected = rf"observer 'west': the {kind} space .*{type(space).__name__}\(.*Box, Discrete"
    with pytest.raises(UnservedSpace, match=expected) as caught:
        Observer(0, Environments(Unserved, 2), walk_policy(), "west")
    assert (caught.value.observer, caught.value.kind) == ("west", kind)
    assert caught.value.space == repr(space)
    with (
        pytest.raises(NoObservers, match="observer0: UnservedSpace: "),
        Observers("process", Environments(Unserved, 2), walk_policy()),
    ):
        pass


class FromGpu:
    """A policy whose answers are on a GPU."""

    def __init__(self) -> None:
        self._policy = walk_policy(rows=4)

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        made = self._policy.act(observations, environments)
        outputs = {name: on_gpu(each) for name, each in made.outputs.items()}
        return Decision(on_gpu(made.actions), made.version, outputs)


def test_answers_on_a_gpu_come_to_the_host() -> None:
    found = Observer(0, Environments(Walk, 4, seed=3), FromGpu()).observe(5)
    expected = Observer(0, Environments(Walk, 4, seed=3), walk_policy(rows=4)).observe(5)
    assert type(found.actions) is Tensor
    assert torch.equal(found.actions, expected.actions)
    assert torch.equal(found.outputs["logs"], expected.outputs["logs"])
