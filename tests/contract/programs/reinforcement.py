"""An agent learns from observers' episodes; their actions one by one, then a batch at a time."""

import json
import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync
from torch.distributions import Categorical
from torch.futures import Future

AGENT_NAME, OBSERVER_NAME = "agent", "observer{}"
STEPS, STATES, GAMMA = 10, 4, 0.9


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(STATES, 16)
        self.affine2 = nn.Linear(16, 2)

    def forward(self, state):
        return torch.softmax(self.affine2(torch.relu(self.affine1(state))), dim=-1)


class Slope:
    """A ball on a board that the actions tilt; the middle is worth most."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.state = torch.rand(STATES, generator=self.generator) * 0.2 - 0.1
        return self.state

    def step(self, action):
        place, speed, tilt, turn = self.state.tolist()
        turn = 0.9 * turn + (0.2 if action else -0.2)
        tilt, speed = tilt + 0.1 * turn, speed + 0.5 * tilt
        self.state = torch.tensor([place + 0.1 * speed, speed, tilt, turn])
        return self.state, 1.0 - abs(self.state[0].item())


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    def __init__(self, batch):
        self.id = rpc.get_worker_info().id - 1
        self.env = Slope(self.id)
        self.select_action = Agent.select_action_batch if batch else Agent.select_action

    def run_episode(self, agent_rref):
        state = self.env.reset()
        rewards = torch.zeros(STEPS)
        for step in range(STEPS):
            if self.select_action is Agent.select_action:
                action = _remote_method(Agent.select_action, agent_rref, self.id, state)
                state, reward = self.env.step(action)
                agent_rref.rpc_sync().report_reward(self.id, reward)
            else:
                action = rpc_sync(
                    agent_rref.owner(), self.select_action, args=(agent_rref, self.id, state)
                )
                state, reward = self.env.step(action)
            rewards[step] = reward
        return rewards


class Agent:
    def __init__(self, world_size, batch):
        self.batch = batch
        self.agent_rref = RRef(self)
        self.ob_rrefs = []
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs.append(remote(ob_info, Observer, args=(batch,)))
        torch.manual_seed(3)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.05)
        count = len(self.ob_rrefs)
        self.generators = [torch.Generator().manual_seed(number) for number in range(count)]
        self.rewards = [[] for _ in range(count)]
        self.saved_log_probs = [[] for _ in range(count)]
        self.batch_log_probs = []
        self.states = torch.zeros(count, STATES)
        self.future_actions = Future()
        self.pending_states = count
        self.lock = threading.Lock()

    def select_action(self, ob_id, state):
        probs = self.policy(state.unsqueeze(0))
        action = torch.multinomial(probs, 1, generator=self.generators[ob_id])[0]
        self.saved_log_probs[ob_id].append(Categorical(probs).log_prob(action))
        return action.item()

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref, ob_id, state):
        self = agent_rref.local_value()
        self.states[ob_id].copy_(state)
        future_action = self.future_actions.then(lambda future: future.wait()[ob_id].item())
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.ob_rrefs)
                distribution = Categorical(self.policy(self.states.clone()))
                actions = distribution.sample()
                self.batch_log_probs.append(distribution.log_prob(actions))
                future_actions, self.future_actions = self.future_actions, Future()
                future_actions.set_result(actions)
        return future_action

    def run_episode(self):
        futs = [
            rpc_async(
                rref.owner(), _call_method, args=(Observer.run_episode, rref, self.agent_rref)
            )
            for rref in self.ob_rrefs
        ]
        rewards = torch.stack([fut.wait() for fut in futs])
        if self.batch:
            log_probs = torch.stack(self.batch_log_probs).t()
        else:
            log_probs = torch.stack([torch.cat(probs) for probs in self.saved_log_probs])
            assert torch.equal(rewards, torch.tensor(self.rewards))
        return rewards, log_probs

    def finish_episode(self, rewards, log_probs):
        returns = torch.zeros_like(rewards)
        future_return = torch.zeros(len(rewards))
        for step in reversed(range(STEPS)):
            future_return = rewards[:, step] + GAMMA * future_return
            returns[:, step] = future_return
        losses = -log_probs * (returns - returns.mean()) / (returns.std() + 1e-6)
        self.optimizer.zero_grad()
        # One by one: gradients of calls that several threads served would add up in any order.
        for loss in losses.t().flatten():
            loss.backward(retain_graph=True)
        self.optimizer.step()
        self.batch_log_probs = []
        for saved in (*self.saved_log_probs, *self.rewards):
            saved.clear()
        return losses.sum().item()


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    name = OBSERVER_NAME.format(rank) if rank else AGENT_NAME
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == 0:
        for batch in (False, True):
            agent = Agent(world_size, batch)
            episodes = []
            for _ in range(4):
                rewards, log_probs = agent.run_episode()
                episodes.append([rewards.tolist(), agent.finish_episode(rewards, log_probs)])
            print(json.dumps({"batch": batch, "episodes": episodes}))
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run_worker, args=(3,), nprocs=3, start_method="fork")
