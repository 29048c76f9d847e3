"""V-trace: targets and advantages from trajectories of an older policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ArgumentTypeError, ConfigurationError


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
