from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.on_gpu import on_gpu
from tests.rl_environments import walk_policy
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rl import (
    Agent,
    LocalPolicy,
    WrongObservations,
    categorical,
    epsilon_greedy,
    uniform,
)


def asked(numbers: list[int], decisions: int = 0) -> torch.Tensor:
    return torch.tensor([[number, decisions, 1] for number in numbers])


def test_draws_are_uniform_and_independent() -> None:
    numbers = torch.arange(300).repeat_interleave(100)
    decisions = torch.arange(100).repeat(300)
    found = uniform(numbers, decisions, 2).numpy()
    assert found.min() >= 0
    assert found.max() < 1
    assert len(np.unique(found)) == found.size
    counts, _ = np.histogram(found, 20)
    assert np.square(counts - 3000).sum() / 3000 < 45  # chi-squared: 1 in 1000 is above 43.8
    for one, other in ((found[:, 0], found[:, 1]), (found[:-1, 0], found[1:, 0])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    by_environment = found[:, 0].reshape(300, 100)
    assert abs(np.corrcoef(by_environment[:-1].ravel(), by_environment[1:].ravel())[0, 1]) < 0.03


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(0, 2**40))
def test_draws_depend_on_the_environment_and_decision_only(numbers: list[int], step: int) -> None:
    together = uniform(torch.tensor(numbers), torch.full((len(numbers),), step), 3)
    alone = [uniform(torch.tensor([each]), torch.tensor([step]), 3) for each in numbers]
    assert torch.equal(together, torch.cat(alone))


def test_sampled_actions_have_the_probabilities_of_the_logits() -> None:
    chances = torch.tensor([0.1, 0.0, 0.6, 0.3])
    draws = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))
    actions, logs = categorical(chances.log().expand(20_000, 4), draws)
    shares = torch.bincount(actions, minlength=4) / 20_000
    assert torch.allclose(shares, chances, atol=0.02)
    assert shares[1] == 0
    assert torch.allclose(logs.exp(), chances[actions])
    assert categorical(torch.zeros(1, 4), torch.tensor([[1 - 2**-53]]))[0].item() == 3


def test_epsilon_greedy() -> None:
    draws = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), 2)
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(20_000, 4)
    shares = torch.bincount(epsilon_greedy(scores, draws, 0.4), minlength=4) / 20_000
    assert torch.allclose(shares, torch.tensor([0.1, 0.7, 0.1, 0.1]), atol=0.02)
    assert (epsilon_greedy(scores, draws, 0.0) == 1).all()


class Gated(LocalPolicy):
    """Sizes that leave something over after each vector instruction."""

    def decide(self, observations: Tensor, draws: Tensor, states: Tensor) -> Any:
        found = torch.sigmoid(self.network(observations))
        return found.argmax(dim=1), {"found": found}, states


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), max_size=5, unique=True))
def test_the_place_of_an_environment_does_not_depend_on_who_asks_with_it(
    order: list[int], cuts: list[int]
) -> None:
    torch.manual_seed(0)
    network, observations = nn.Linear(7, 5), torch.randn(12, 7)
    expected = Gated(network, (7,), rows=6).act(observations, asked(list(range(12))))
    policy = Gated(network, (7,), rows=6)
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True):
        who = order[first:last]
        found = policy.act(observations[who], asked(who))
        assert torch.equal(found.outputs["found"], expected.outputs["found"][who])
        assert torch.equal(found.actions, expected.actions[who])


def test_states_are_kept_by_environment_and_saved() -> None:
    policy = walk_policy(rows=4)
    seen = torch.zeros(2, 3)
    policy.act(seen, asked([5, 10]))
    going_on = torch.tensor([[10, 1, 0], [5, 1, 0]])
    assert policy.act(seen, going_on).outputs["counts"].tolist() == [1, 1]
    assert policy.act(seen, torch.tensor([[5, 2, 0], [10, 2, 1]])).outputs["counts"].tolist() == [
        2,
        0,
    ]
    with policy.updating() as network:
        network[0].bias.data += 1
    other = walk_policy(rows=4)
    other.load_state_dict(policy.state_dict())
    assert (other.version, other.forwards, other.decisions) == (1, 3, 6)
    answers = [each.act(seen, torch.tensor([[5, 3, 0], [10, 3, 0]])) for each in (policy, other)]
    assert answers[0].outputs["counts"].tolist() == [3, 1]
    assert torch.equal(answers[0].outputs["logs"], answers[1].outputs["logs"])
    policy.forget(torch.tensor([5]))
    assert policy.act(seen, torch.tensor([[5, 4, 0], [10, 4, 0]])).outputs["counts"].tolist() == [
        0,
        2,
    ]


def test_an_update_that_fails_is_no_version() -> None:
    policy = walk_policy()
    with pytest.raises(ZeroDivisionError), policy.updating():
        1 / 0  # noqa: B018
    assert policy.version == 0


def test_observations_that_do_not_fit_are_named() -> None:
    policy = walk_policy()
    with pytest.raises(
        WrongObservations, match=r"environments 7, 8 .*\[2, 4\]; .*\[2, 3\]"
    ) as caught:
        policy.act(torch.zeros(2, 4), asked([7, 8]))
    assert caught.value.environments == (7, 8)
    with pytest.raises(WrongObservations):
        policy.act(torch.zeros(3, 3), asked([7, 8]))
    assert policy.forwards == 0


def test_a_network_on_a_gpu_decides_for_environments_on_the_host() -> None:
    class Policy(LocalPolicy):
        def decide(
            self, observations: torch.Tensor, draws: torch.Tensor, states: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
            actions = on_gpu(observations[:, 0].long())
            return actions, {"logs": on_gpu(draws[:, 0])}, on_gpu(states + 1)

    policy = Policy(torch.nn.Linear(1, 1), (1,), state_size=2)
    for _ in range(2):
        decision = policy.act(torch.ones(3, 1), on_gpu(asked([0, 1, 2])))
        assert decision.actions.numpy().tolist() == [1, 1, 1]
        assert decision.outputs["logs"].numpy().shape == (3,)
    assert policy.state_dict()["states"]["1"].numpy().tolist() == [1.0, 1.0]


def test_draws_of_another_shape_are_refused() -> None:
    """With three actions, two columns would be compared with one probability each."""
    logits = torch.zeros(4, 3)
    for draws in (torch.rand(4, 2), torch.rand(4), torch.rand(3, 1)):
        with pytest.raises(ConfigurationError, match="Make the policy with draws=1"):
            categorical(logits, draws)
    with pytest.raises(ConfigurationError, match=r"and \(batch, 2\)"):
        epsilon_greedy(logits, torch.rand(4, 1), 0.1)


def test_what_decide_returns_is_checked() -> None:
    class Returning(LocalPolicy):
        found: Any = None

        def decide(self, *given: torch.Tensor) -> Any:
            return self.found

    policy = Returning(nn.Linear(1, 1), (1,))
    actions, states = torch.zeros(3), torch.zeros(3, 0)
    for found, text in (
        (actions, "it returned a Tensor"),
        ((actions, states), "it returned a tuple of a Tensor, a Tensor"),
        ((actions, {"value": 3.0}, states), "value of decide is 3.0, a float"),
    ):
        policy.found = found
        with pytest.raises(ArgumentTypeError, match=text):
            policy.act(torch.zeros(3, 1), asked([0, 1, 2]))
    with pytest.raises(TypeError, match="observation_shape is 4, an int"):
        LocalPolicy(nn.Linear(1, 1), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="policy is a Linear"):
        Agent(nn.Linear(1, 1))  # type: ignore[arg-type]
