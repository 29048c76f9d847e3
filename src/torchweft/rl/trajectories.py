"""Trajectories: what environments did for some steps, time first; and V-trace targets of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import rebuilds_plain
from torchweft.rpc import RRef


@rebuilds_plain
class Episode(NamedTuple):
    """An episode that has ended.

    Attributes:
        environment: Number of the environment.
        reward: The sum of its rewards.
        steps: How many steps it had.
    """

    environment: int
    reward: float
    steps: int


@rebuilds_plain
@dataclass
class Trajectory:
    """Steps of all environments of one observer: ``steps`` rows of ``environments`` columns.

    Attributes:
        observer: Name of the observer.
        number: How many trajectories the observer had made before.
        environments: Numbers of the environments, int64 ``(environments,)``.
        observations: Those from which the actions were chosen, ``(steps, environments, ...)``.
        actions: ``(steps, environments, ...)``.
        rewards: float32 ``(steps, environments)``.
        terminated: Whether the task was over after the step, bool.
        truncated: Whether a limit ended the episode after the step, bool.
        valid: False for a step in which a native vector environment only was reset, bool.
        starts: Whether an episode starts with this observation, bool.
        versions: Version of the policy that chose each action, int64.
        outputs: Further outputs of the policy, such as log-probabilities, by name.
        last_observations: Those after the last step, ``(environments, ...)``.
        final_places: Step and column of each last observation of an episode, int64 ``(ends, 2)``.
        final_observations: These observations, ``(ends, ...)``.
        episodes: The episodes that ended.
    """

    observer: str
    number: int
    environments: Tensor
    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    starts: Tensor
    versions: Tensor
    outputs: dict[str, Tensor]
    last_observations: Tensor
    final_places: Tensor
    final_observations: Tensor
    episodes: list[Episode] = field(default_factory=list)

    @property
    def ends(self) -> Tensor:
        """Whether an episode ended after the step, bool ``(steps, environments)``."""
        return self.terminated | self.truncated

    @property
    def steps(self) -> int:
        """How many environment steps there were, without mere resets."""
        return int(self.valid.sum())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self._tensors())

    def _tensors(self) -> list[Tensor]:
        own = [each for each in vars(self).values() if isinstance(each, Tensor)]
        return own + list(self.outputs.values())

    def next_observations(self) -> Tensor:
        """Returns the observation that followed each action, also where the episode ended."""
        following = torch.cat([self.observations[1:], self.last_observations[None]])
        if not len(self.final_places):
            return following
        # Rows are taken, not set: torch cannot do that for all types, such as uint16.
        rows = following.flatten(0, 1)
        steps, columns = self.final_places.unbind(1)
        sources = torch.arange(len(rows), device=rows.device)
        ends = torch.arange(len(steps), device=rows.device)
        sources[steps * following.shape[1] + columns] = len(rows) + ends
        return torch.cat([rows, self.final_observations])[sources].view(following.shape)

    def transitions(self) -> dict[str, Tensor]:
        """Returns the valid steps one by one, as rows of a replay buffer.

        Returns:
            ``observations``, ``actions``, ``rewards``, ``next_observations`` and ``terminated``,
            each ``(steps * environments, ...)``.
        """
        keep = self.valid
        return {
            "observations": self.observations[keep],
            "actions": self.actions[keep],
            "rewards": self.rewards[keep],
            "next_observations": self.next_observations()[keep],
            "terminated": self.terminated[keep],
        }


def join(trajectories: list[Trajectory]) -> Trajectory:
    """Puts trajectories of several observers side by side: the columns of all of them.

    All must have the same steps. ``observer`` names all of them.

    Raises:
        ConfigurationError: There is no trajectory, or they differ in their number of steps.
    """
    if not trajectories:
        raise ConfigurationError("join was given no trajectory")
    if len({len(each.rewards) for each in trajectories}) > 1:
        lengths = ", ".join(f"{each.observer}: {len(each.rewards)}" for each in trajectories)
        raise ConfigurationError(f"join needs trajectories of equally many steps; given: {lengths}")
    shift, places = 0, []
    for each in trajectories:
        places.append(each.final_places + each.final_places.new_tensor([0, shift]))
        shift += len(each.environments)

    def columns(name: str) -> Any:
        return torch.cat([getattr(each, name) for each in trajectories], dim=1)

    def rows(name: str) -> Any:
        return torch.cat([getattr(each, name) for each in trajectories])

    by_column = "observations actions rewards terminated truncated valid starts versions".split()
    return Trajectory(
        observer=", ".join(each.observer for each in trajectories),
        number=trajectories[0].number,
        environments=rows("environments"),
        last_observations=rows("last_observations"),
        final_observations=rows("final_observations"),
        final_places=torch.cat(places),
        outputs={
            name: torch.cat([each.outputs[name] for each in trajectories], dim=1)
            for name in trajectories[0].outputs
        },
        episodes=[episode for each in trajectories for episode in each.episodes],
        **{name: columns(name) for name in by_column},
    )


@rebuilds_plain
class Collected(NamedTuple):
    """What an observer sends: a trajectory, or a reference to one that stays there until pulled.

    Attributes:
        oldest: The oldest version of the policy that chose an action.
        size_bytes: Bytes of the trajectory.
        held: The trajectory, or a reference to it.
    """

    oldest: int
    size_bytes: int
    held: Trajectory | RRef[Trajectory]

    def fetch(self, timeout_s: float) -> Trajectory:
        """Returns the trajectory; blocks while it is pulled from its observer."""
        if isinstance(self.held, Trajectory):
            return self.held
        return self.held.to_here(timeout_s)


# V-trace: targets and advantages from trajectories of an older policy


class VTrace(NamedTuple):
    """What a learner of values and of a policy needs.

    Attributes:
        targets: What the values should be, ``(steps, environments)``.
        advantages: By how much each action was better than the value, weighted by the truncated
            ratio, ``(steps, environments)``.
    """

    targets: Tensor
    advantages: Tensor


def v_trace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ends: Tensor,
    *,
    discount: float,
    trace_decay: float = 1.0,
    most_ratio: float = 1.0,
) -> VTrace:
    """Computes V-trace targets (Espeholt et al., "IMPALA", 2018, section 4). Without gradients.

    With ``log_ratios`` of 0, as of a policy that has not changed, targets are n-step returns, or
    with ``trace_decay`` those of TD(lambda). An episode that was truncated goes on with the value
    of its last observation.

    Args:
        log_ratios: Log-probability of each action by the present policy, less that by the policy
            which chose it. All arguments are ``(steps, environments)``.
        rewards: Rewards.
        values: Values of the observations.
        next_values: Values of the observations that followed, also where an episode ended.
        terminated: Where the task was over: nothing followed.
        ends: Where an episode ended, by termination or truncation.
        discount: Factor of the rewards of the next step.
        trace_decay: Further factor of the traces.
        most_ratio: Bound of the ratios, both of the traces and of the differences.

    Raises:
        ConfigurationError: Arguments have different shapes, or no steps.
        ArgumentTypeError: ``terminated`` or ``ends`` is not of type bool.
    """
    _check(
        values,
        log_ratios=log_ratios,
        rewards=rewards,
        next_values=next_values,
        terminated=terminated,
        ends=ends,
    )
    with torch.no_grad():
        ratios = log_ratios.exp().clamp(max=most_ratio)
        following = discount * next_values * ~terminated
        differences = ratios * (rewards + following - values)
        traces = discount * trace_decay * ratios * ~ends
        corrections = torch.zeros_like(values)
        correction = torch.zeros_like(values[0])
        for step in reversed(range(len(values))):
            correction = differences[step] + traces[step] * correction
            corrections[step] = correction
        targets = values + corrections
        # After the last step of a trajectory or an episode, the value is the best that is known.
        next_targets = torch.cat([targets[1:], next_values[-1:]])
        next_targets = torch.where(ends, next_values, next_targets)
        advantages = ratios * (rewards + discount * next_targets * ~terminated - values)
        return VTrace(targets, advantages)


def _check(values: Tensor, **others: Tensor) -> None:
    """Refuses tensors that PyTorch would combine with another meaning, without an error."""
    for name, each in others.items():
        if each.shape != values.shape:
            raise ConfigurationError(
                f"{name} has the shape {list(each.shape)}, and values {list(values.shape)}; all "
                "arguments must have the same, (steps, environments)"
            )
    for name in ("terminated", "ends"):
        if others[name].dtype != torch.bool:
            raise ArgumentTypeError(
                f"{name} is a tensor of {others[name].dtype}; pass one of torch.bool"
            )
    if not values.ndim or not len(values):
        raise ConfigurationError(f"values has the shape {list(values.shape)}: it has no steps")
