"""Cuts into stages of even weight, by one number for each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from torchweft.pipeline.errors import PartitionError
from torchweft.pipeline.partition.profiles import LayerProfile, Profile
from torchweft.pipeline.partition.search import Search


def balance(
    weights: Profile | Sequence[float],
    n_stages: int,
    *,
    by: Literal["time", "memory", "parameters"] | None = None,
) -> tuple[int, ...]:
    """Returns the cuts into stages whose largest weight is as small as can be.

    Exact; among such cuts, the one with the most even stages (smallest sum of squares) is taken.

    Args:
        weights: A weight for each layer, 0 or more, or a profile to take them from.
        n_stages: Number of stages.
        by: For a profile, the weight of a layer: ``"time"`` (the default) of forward and backward
            pass; ``"memory"`` for weights, gradients, optimizer state and the saved activations
            of one micro-batch; or the bytes of its trained ``"parameters"``.

    Returns:
        Index of the first layer of each stage except the first, as ``Plan.manual`` takes it.

    Raises:
        PartitionError: If there are fewer layers than stages, or a weight is negative.
    """
    values = _numbers(weights, by)
    n_layers = len(values)
    if not n_layers:
        raise PartitionError("there are no layers to balance; give at least one weight")
    if not 1 <= n_stages <= n_layers:
        raise PartitionError(
            f"{n_layers} layers cannot form {n_stages} stages; pass n_stages from 1 to {n_layers}"
        )
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise PartitionError(f"layer {number} has weight {value}; it must be 0 or more")
    totals = np.cumsum([0, *values], dtype=float)
    blocks = totals[None, :] - totals[:, None]
    blocks[np.tri(n_layers + 1, dtype=bool)] = math.inf
    squares = (blocks / (totals[-1] or 1)) ** 2
    search = Search(n_layers, n_stages, lambda *_: blocks, lambda *_: squares, lambda _: [1])
    return tuple(layers.start for layers, _ in search.best_load().stages[1:])


def _numbers(weights: Profile | Sequence[float], by: str | None) -> list[float]:
    if not isinstance(weights, Profile):
        if by is not None:
            raise PartitionError(f"by={by!r} needs a profile; the weights are numbers already")
        return list(weights)
    criterion = by or "time"
    if criterion not in _CRITERIA:
        raise PartitionError(f"by={by!r} is none of {', '.join(_CRITERIA)}")
    return [_CRITERIA[criterion](layer) for layer in weights.layers]


def _memory_of(layer: LayerProfile) -> int:
    return 2 * layer.weight_bytes + layer.optimizer_bytes + layer.fixed_bytes + layer.saved_bytes


_CRITERIA: dict[str, Callable[[LayerProfile], float]] = {
    "time": lambda layer: layer.compute_seconds,
    "memory": _memory_of,
    "parameters": lambda layer: layer.weight_bytes,
}
