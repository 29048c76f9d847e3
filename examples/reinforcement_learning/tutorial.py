"""Many observers and one agent, in the two forms of PyTorch's RPC tutorials.

``python tutorial.py one``: an observer makes a call for each step, and the agent a forward pass.
``python tutorial.py batched``: the calls of all observers share a forward pass.

REINFORCE learns to balance a pole. The agent starts an episode on all observers; each observer
asks for actions and reports rewards. The agent learns from all of them, then starts the next one.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft import rpc
from torchweft.rpc import functions

OBSERVERS, STEPS = 3, 200
DISCOUNT = 0.99


class Observer:
    """Runs one environment, for one episode at a time."""

    def __init__(self, seed: int) -> None:
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.reset(seed=seed)

    def run_episode(self, agent: rpc.RRef[Agent], way: str) -> list[float]:
        """Returns the rewards."""
        rewards = []
        state, _ = self.environment.reset()
        observer = rpc.get_worker_info().name
        for _ in range(STEPS):
            call = agent.rpc_sync()
            row = torch.from_numpy(state)
            action = call.choose(observer, row) if way == "one" else call.choose_many(observer, row)
            state, reward, terminated, truncated, _ = self.environment.step(int(action))
            rewards.append(float(reward))
            if terminated or truncated:
                break
        return rewards


class Agent:
    """Decides for all observers, and learns from all episodes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.taken: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.forwards = 0

    def choose(self, observer: str, state: Tensor) -> int:
        """Returns the action for one observer."""
        return int(self._decide([observer], state[None]))

    @functions.batched(largest=OBSERVERS, smallest=OBSERVERS, longest_wait=0.002)
    def choose_many(self, observers: list[str], states: Tensor) -> Tensor:
        """Does the same for all observers that ask at this time."""
        return self._decide(observers, states)

    def _decide(self, observers: list[str], states: Tensor) -> Tensor:
        self.forwards += 1
        with torch.no_grad():
            chances = self.policy(states).softmax(dim=1)
        actions = torch.multinomial(chances, 1).squeeze(1)
        for observer, state, action in zip(observers, states, actions, strict=True):
            self.taken.setdefault(observer, []).append((state, action))
        return actions

    def learn(self, rewards: dict[str, list[float]]) -> None:
        """Learns from an episode of each observer, by REINFORCE."""
        states, actions, returns = [], [], []
        for observer, own in rewards.items():
            for state, action in self.taken.pop(observer):
                states.append(state)
                actions.append(action)
            following = 0.0
            episode = []
            for reward in reversed(own):
                following = reward + DISCOUNT * following
                episode.append(following)
            returns += reversed(episode)
        gains = torch.tensor(returns)
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        logs = self.policy(torch.stack(states)).log_softmax(dim=1)
        loss = -(logs.gather(1, torch.stack(actions)[:, None]).squeeze(1) * gains).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Many observers and one agent.")
    parser.add_argument("way", choices=["one", "batched"])
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with weft.cluster(workers=OBSERVERS) as cluster:
        agent = Agent()
        reference = rpc.RRef(agent)
        observers = {
            name: rpc.remote(name, Observer, (seed,)) for seed, name in enumerate(cluster.names)
        }
        steps, began_s = 0, time.monotonic()
        for episode in range(options.episodes):
            calls = {
                name: each.rpc_async().run_episode(reference, options.way)
                for name, each in observers.items()
            }
            rewards = {name: call.wait() for name, call in calls.items()}
            agent.learn(rewards)
            lengths = [len(each) for each in rewards.values()]
            steps += sum(lengths)
            print(f"episode {episode}: returns", *lengths)
        seconds = time.monotonic() - began_s
        print(f"{steps / seconds:.0f} environment steps/s, {agent.forwards} forward passes")


if __name__ == "__main__":
    main()
