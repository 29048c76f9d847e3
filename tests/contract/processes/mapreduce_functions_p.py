"""Functions for workers in the tests of partitioners."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def half_of(part: Tensor) -> Tensor:
    return part.flatten()[: part.numel() // 2]


def cubes(part: Tensor) -> Tensor:
    return part.pow(3).sum()


def workers_of(partitioner: Any, batch: Tensor) -> list[int]:
    return [part[0] for part in partitioner(batch)]
