"""Random numbers by environment: each has a generator of its own, without state.

A policy that samples with one generator for a batch gives each environment numbers that depend on
the other environments of its batch. Here the numbers of an environment depend on its number and on
how many decisions it has had, and on nothing else. So they are the same in any batch, in any
process, and after a restart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchweft.errors import ConfigurationError

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def uniform(environments: Tensor, decisions: Tensor, count: int = 1) -> Tensor:
    """Returns numbers in [0, 1), the same for the same environment and decision. Thread-safe.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), started from the number of the environment, at the position of the decision.

    Args:
        environments: Numbers of environments, int64 ``(batch,)``.
        decisions: How many decisions each has had before, int64 ``(batch,)``.
        count: How many numbers a decision takes; always the same in a program.

    Returns:
        float64 ``(batch, count)``.
    """
    start = _mixed(_words(environments) * _GAMMA + _GAMMA)
    positions = _words(decisions)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype="u8")
    words = _mixed(start[:, None] + positions * _GAMMA)
    return torch.from_numpy((words >> np.uint64(11)) * _UNIT)


def _words(numbers: Tensor) -> NDArray[np.uint64]:
    words: NDArray[Any] = numbers.cpu().numpy()
    return words.astype(np.uint64)


def categorical(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Samples actions by the inverse of the cumulative probabilities.

    Args:
        logits: ``(batch, actions)``, on any device.
        draws: Numbers in [0, 1), ``(batch, 1)``, on any device.

    Returns:
        Actions, int64 ``(batch,)``, and their log-probabilities ``(batch,)``.

    Raises:
        ConfigurationError: ``draws`` or ``logits`` has another shape.
    """
    _check("categorical", "logits", logits, draws, 1)
    logs = logits.log_softmax(dim=1)
    below = logs.double().exp().cumsum(dim=1)
    # Rounding may leave the last sum below a draw: that is of the last action which may be chosen.
    is_before = (below[:, :-1] <= draws.to(logits.device)) & (below[:, :-1] < below[:, -1:])
    actions = is_before.sum(dim=1)
    return actions, logs.gather(1, actions[:, None]).squeeze(1)


def epsilon_greedy(scores: Tensor, draws: Tensor, epsilon: float) -> Tensor:
    """Returns the best actions, or with a probability random ones.

    Args:
        scores: ``(batch, actions)``, on any device.
        draws: Numbers in [0, 1), ``(batch, 2)``, on any device.
        epsilon: The probability of a random action.

    Returns:
        Actions, int64 ``(batch,)``.

    Raises:
        ConfigurationError: ``draws`` or ``scores`` has another shape.
    """
    _check("epsilon_greedy", "scores", scores, draws, 2)
    draws = draws.to(scores.device)
    guesses = (draws[:, 1] * scores.shape[1]).long()
    return torch.where(draws[:, 0] < epsilon, guesses, scores.argmax(dim=1))


def _check(function: str, name: str, given: Tensor, draws: Tensor, count: int) -> None:
    if given.ndim != 2 or draws.shape != (len(given), count):
        raise ConfigurationError(
            f"{function} was given {name} of shape {list(given.shape)} and draws of shape "
            f"{list(draws.shape)}; they must be (batch, actions) and (batch, {count}). Make the "
            f"policy with draws={count}, or pass {count} of its columns"
        )
