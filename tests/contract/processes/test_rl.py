"""``torchweft.rl`` over workers: the same bits, back-pressure, bad input, and those left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.processes import rl_functions as functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.rl_functions import (
    LONGEST_WAIT_S,
    Gated,
    Holding,
    Limited,
    OneShort,
    Patient,
    Telling,
    learn,
    make_walk,
    rows_of,
)
from tests.rl_environments import Walk, walk_policy
from torchweft import rpc
from torchweft.errors import ConfigurationError, UnknownWorker
from torchweft.launch import Cluster
from torchweft.rl import (
    Agent,
    Environments,
    LocalPolicy,
    NoObservers,
    Observers,
    ProgramMismatch,
    ReplayBuffer,
    SpacesMismatch,
    Trajectory,
    WrongActions,
    categorical,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ["worker0", "worker1"]
LIMIT_S = 20.0


def trained(where: Any, *, halves: int = 1, rounds: int = 3) -> tuple[list[Any], Agent]:
    """Rounds of a program that learns in between."""
    agent = Agent(walk_policy(rows=8))
    environments = Environments(make_walk, 4, seed=3, halves=halves)
    found: list[Trajectory] = []
    with Observers(where, environments, agent, count=2, steps=9, time_limit_s=LIMIT_S) as observers:
        for _ in range(rounds):
            found += (new := observers.round())
            learn(agent, new)
        assert observers.left_out == {}
        assert observers.staleness == {0: 2 * rounds}
    return rows_of(found), agent


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_the_same_program_gives_the_same_bits_everywhere(group: Cluster) -> None:
    expected, alone = trained("process")
    assert alone.policy.forwards == 3 * 9 * 2
    found, agent = trained(WORKERS)
    assert equal(found, expected)
    assert agent.policy.forwards == agent.statistics().batches
    assert agent.statistics().calls == 3 * 9 * 2
    assert equal(trained(WORKERS, halves=2)[0], expected)
    assert equal(trained("threads")[0], expected)


@pytest.mark.parametrize("where", [[*WORKERS, "worker0"], "threads"], ids=["workers", "threads"])
def test_a_full_batch_is_one_forward_pass_for_all_environments(group: Cluster, where: Any) -> None:
    agent = Patient(walk_policy())
    with Observers(
        where, Environments(make_walk, 4), agent, count=3, steps=9, time_limit_s=LIMIT_S
    ) as observers:
        steps = sum(each.steps for _ in range(3) for each in observers.round())
    assert steps == 3 * 9 * 3 * 4
    assert agent.policy.forwards == steps / (3 * 4)
    assert agent.statistics().sizes == {3: 3 * 9}


def test_an_observer_that_pauses_costs_one_wait_and_the_forward_passes_that_it_missed(
    group: Cluster,
) -> None:
    agent = Limited(walk_policy())

    class Pausing(Walk):
        """A walk that takes its third step when the others have taken all of theirs."""

        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            taken.append(1)
            if len(taken) == 3:
                wait_until(
                    lambda: agent.policy.decisions == 3 * 3 + 2 * 3, lambda: "the others stopped"
                )
            return super().step(action)

    def make() -> Walk:
        made.append(1)
        return Pausing() if len(made) == 2 else Walk()

    made: list[int] = []
    taken: list[int] = []
    with Observers(
        "threads", Environments(make), agent, count=3, steps=6, time_limit_s=LIMIT_S
    ) as observers:
        assert sum(each.steps for each in observers.round()) == 3 * 6
        # Three steps of all; three of two, which waited once; three of the one, alone.
        assert agent.statistics().sizes == {3: 3, 2: 3, 1: 3}
        assert agent.statistics().wait_s < 2 * 3 * LONGEST_WAIT_S
        observers.round()
        assert agent.statistics().sizes == {3: 3 + 6, 2: 3, 1: 3}
    assert agent.policy.forwards == 2 * 6 + 3


def test_one_half_steps_while_the_agent_is_held_with_the_other(group: Cluster) -> None:
    functions.forget_steps()
    agent = Holding(walk_policy())
    environments = Environments(Telling, 2, halves=2)
    with Observers(
        WORKERS[:1], environments, agent, steps=5, time_limit_s=LIMIT_S, full_batches=False
    ) as observers:
        (found,) = observers.round()
    assert found.steps == agent.policy.decisions == 2 * 5


def test_without_a_group_threads_do_as_one_process() -> None:
    assert equal(trained("threads")[0], trained("process")[0])


def test_a_learner_slows_observers_down_and_refuses_what_is_old(group: Cluster) -> None:
    agent = Agent(walk_policy())
    environments = Environments(make_walk, 2)
    with Observers(
        WORKERS, environments, agent, steps=4, most_stale=2, full_batches=False,
        time_limit_s=LIMIT_S,
    ) as observers:  # fmt: skip
        stream = observers.stream()
        first = next(stream)
        assert {first.observer} < set(WORKERS)
        # One trajectory of each observer is under way, and no more are made meanwhile.
        wait_until(lambda: agent.policy.decisions >= 2 * 4 * 3, lambda: "no further trajectory")
        decided = agent.policy.decisions
        assert decided <= 2 * 4 * 4
        for _ in range(3):
            with agent.policy.updating():
                pass
        for _ in range(4):
            found = next(stream)
            assert int(found.versions.min()) >= agent.version - 2
        assert observers.refused >= 1
        assert max(observers.staleness) <= 2


def test_large_trajectories_stay_until_they_are_taken(group: Cluster) -> None:
    agent, environments = Agent(walk_policy(rows=4)), Environments(make_walk, 2)
    found = []
    for limit in (0, 1 << 30):
        with Observers(
            WORKERS, environments, agent, steps=5, by_reference_bytes=limit, time_limit_s=LIMIT_S
        ) as observers:
            found.append(rows_of(observers.round()))
    assert equal(found[0], found[1])


def test_a_late_observer_is_left_out_until_it_comes(group: Cluster) -> None:
    agent = Agent(walk_policy())
    environments = Environments(Gated, 1)  # that of worker1 is environment 1
    # The limit holds for worker0 as well, also on a busy machine; the second round does not wait.
    with Observers(WORKERS, environments, agent, steps=4, time_limit_s=1.0) as observers:
        for _ in range(2):
            assert [each.observer for each in observers.round()] == ["worker0"]
            assert observers.left_out == {"worker1": None}
        rpc.rpc_sync("worker1", functions.go_on)
        seen: set[str] = set()
        wait_until(
            lambda: (
                bool(seen.update(each.observer for each in observers.round()))
                or seen == set(WORKERS)
            ),
            lambda: f"only {seen}",
        )
        assert observers.left_out == {}
        assert len(observers.round()) == 2


def test_other_spaces(group: Cluster) -> None:
    agent = Agent(walk_policy())
    environments = Environments(functions.make_by_worker, 2)
    with Observers(WORKERS, environments, agent, steps=3, time_limit_s=LIMIT_S) as observers:
        error = observers.left_out["worker1"]
        assert isinstance(error, SpacesMismatch)
        assert error.observer == "worker1"
        assert "(2,)" in error.found
        assert "(3,)" in error.expected
        assert [each.observer for each in observers.round()] == ["worker0"]
        with pytest.raises(SpacesMismatch):
            observers.replace(1)
        observers.replace(1, "worker0")
        assert len(observers.round()) == 2


def test_another_version_of_the_program(group: Cluster) -> None:
    rpc.rpc_sync("worker0", functions.change_program)
    agent = Agent(walk_policy())
    with Observers(
        WORKERS, Environments(make_walk, 2), agent, steps=3, time_limit_s=LIMIT_S
    ) as observers:
        error = observers.left_out["worker0"]
        assert isinstance(error, ProgramMismatch)
        assert (error.observer, len(error.found)) == ("worker0", len(error.expected))
        assert "restart the worker" in str(error)
        assert [each.observer for each in observers.round()] == ["worker1"]
        rpc.rpc_sync("worker0", functions.restore_program)
        assert observers.take_back() == ["worker0"]
        assert len(observers.round()) == 2


def test_a_wrong_number_of_actions_names_the_observer(group: Cluster) -> None:
    agent = Agent(OneShort(nn.Linear(3, 2), (3,), state_size=1))
    with Observers(
        WORKERS, Environments(make_walk, 2), rpc.RRef(agent), steps=3, time_limit_s=LIMIT_S
    ) as observers:
        with pytest.raises(NoObservers, match=r"worker0: .*worker1: "):
            observers.round()
        for name in WORKERS:
            error = observers.left_out[name]
            assert isinstance(error, WrongActions)
            assert error.found[0] == error.expected[0] - 1
            assert error.observer == name
            assert f"observer {name!r}: " in str(error)


def test_an_agent_of_another_worker(group: Cluster) -> None:
    agent = rpc.remote("worker0", functions.make_agent)
    with Observers(
        WORKERS, Environments(make_walk, 2), agent, steps=3, most_stale=0, time_limit_s=LIMIT_S
    ) as observers:
        assert len(observers.round()) == 2
        assert agent.rpc_sync().get_version() == 0
        assert observers.staleness == {0: 2}


def test_states_of_environments_that_are_gone_are_dropped(group: Cluster) -> None:
    def kept(agent: Any) -> list[str]:
        agent = agent.rpc_sync() if isinstance(agent, rpc.RRef) else agent
        return sorted(agent.state_dict()["states"])

    for where, agent in (
        ("process", Agent(walk_policy())),
        (WORKERS, Agent(walk_policy())),
        (WORKERS, rpc.remote("worker0", functions.make_agent)),
    ):
        with Observers(
            where, Environments(make_walk, 2, seed=5), agent, count=2, steps=2, time_limit_s=LIMIT_S
        ) as observers:
            observers.round()
            assert kept(agent) == ["5", "6", "7", "8"]
        wait_until(lambda agent=agent: not kept(agent), lambda: "they are kept")  # type: ignore[misc]


def test_a_vector_of_gymnasium_itself(group: Cluster) -> None:
    pytest.importorskip("gymnasium")

    class Balance(LocalPolicy):
        def decide(
            self, observations: torch.Tensor, draws: torch.Tensor, states: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
            actions, logs = categorical(self.network(observations), draws)
            return actions, {"logs": logs}, states

    def collected(where: Any) -> list[Trajectory]:
        torch.manual_seed(0)
        agent = Agent(Balance(nn.Linear(4, 2), (4,), rows=16))
        environments = Environments("CartPole-v1", 8, seed=3, halves=2, vectorized=True)
        with Observers(
            where, environments, agent, count=2, steps=60, time_limit_s=LIMIT_S
        ) as observers:
            return [each for _ in range(2) for each in observers.round()]

    found = collected(WORKERS)
    assert equal(rows_of(found), rows_of(collected("process")))
    for each in found:
        assert each.observations.shape == (60, 8, 4)
        assert each.ends.any()
        assert torch.equal(each.valid[1:], ~each.ends[:-1])
        assert each.steps == 60 * 8 - int((~each.valid).sum())
        assert (each.rewards[each.valid] == 1).all()
        assert all(episode.reward == episode.steps for episode in each.episodes)


def test_a_replay_buffer_on_a_worker(group: Cluster) -> None:
    agent = Agent(walk_policy())
    buffer = rpc.remote("worker0", ReplayBuffer, (1000,), {"priority_power": 0.6})
    with Observers(
        WORKERS, Environments(make_walk, 2), agent, steps=5, time_limit_s=LIMIT_S
    ) as observers:
        found = observers.round()
    for each in found:
        buffer.rpc_sync().add(each.transitions())
    assert buffer.rpc_sync().size() == 20
    sample = buffer.rpc_sync().sample(64)
    following = torch.cat([each.next_observations().flatten(0, 1) for each in found])
    assert torch.equal(sample.columns["next_observations"], following[sample.rows])
    assert buffer.rpc_sync().set_priorities(sample.rows, torch.ones(64)) == 0


def test_mistakes(group: Cluster) -> None:
    agent, environments = Agent(walk_policy()), Environments(Walk, 1)
    with pytest.raises(ConfigurationError, match="where='worker0': pass"):
        Observers("worker0", environments, agent)
    with pytest.raises(ConfigurationError, match="names no workers"):
        Observers([], environments, agent)
    with pytest.raises(ConfigurationError, match="steps=0"):
        Observers("process", environments, agent, steps=0)
    with pytest.raises(NoObservers, match="nobody") as caught:
        Observers(["nobody"], environments, agent, time_limit_s=LIMIT_S)
    assert isinstance(caught.value.__cause__, UnknownWorker)
    with (
        Observers("process", environments, agent) as observers,
        pytest.raises(ConfigurationError, match="observer 1 of 1"),
    ):
        observers.replace(1)
