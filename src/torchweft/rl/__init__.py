"""Reinforcement learning: many observers, one agent that decides for all, and a learner."""

from torchweft.rl.agent import Agent, FollowingPolicy, RemotePolicy
from torchweft.rl.environments import Environments
from torchweft.rl.errors import (
    AgentLost,
    BadPriority,
    ColumnsMismatch,
    NoObservers,
    NotEnough,
    ProgramMismatch,
    ReplayError,
    SpacesMismatch,
    TooStale,
    UnservedSpace,
    WrongActions,
    WrongObservations,
)
from torchweft.rl.learner import Observers
from torchweft.rl.observer import Observer
from torchweft.rl.policies import (
    Decision,
    LocalPolicy,
    Policy,
    categorical,
    epsilon_greedy,
    uniform,
)
from torchweft.rl.replay import ReplayBuffer, Sample, SumTree
from torchweft.rl.trajectories import Episode, Trajectory, VTrace, join, v_trace

CALLABLES = (
    *(Observer, ReplayBuffer, BadPriority, ColumnsMismatch, NotEnough, ReplayError),
    *(UnservedSpace, WrongActions, WrongObservations),
)
"""The classes that a strict worker names in ``RpcBackendOptions(callables=...)`` to run observers
or a replay buffer, or to be told the errors of those of others."""

__all__ = [
    "CALLABLES",
    "Agent",
    "AgentLost",
    "BadPriority",
    "ColumnsMismatch",
    "Decision",
    "Environments",
    "Episode",
    "FollowingPolicy",
    "LocalPolicy",
    "NoObservers",
    "NotEnough",
    "Observer",
    "Observers",
    "Policy",
    "ProgramMismatch",
    "RemotePolicy",
    "ReplayBuffer",
    "ReplayError",
    "Sample",
    "SpacesMismatch",
    "SumTree",
    "TooStale",
    "Trajectory",
    "UnservedSpace",
    "VTrace",
    "WrongActions",
    "WrongObservations",
    "categorical",
    "epsilon_greedy",
    "join",
    "uniform",
    "v_trace",
]
