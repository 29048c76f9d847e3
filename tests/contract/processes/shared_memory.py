"""Functions that the workers of the shared memory tests run, and queries of their state."""

from __future__ import annotations

import torch

import torchweft.memory

kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> int:
    kept.append(tensor)
    return len(kept)


def checksum(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def checksum_of_kept(index: int) -> float:
    return checksum(kept[index])


def fill_kept(index: int, value: float) -> None:
    kept[index].fill_(value)


def drop_kept() -> None:
    kept.clear()


def fill_slice(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor[1:3] = value
    return tensor


def make_shared(count: int) -> torch.Tensor:
    """Returns shared memory of this worker, which drops it at once."""
    return torchweft.memory.share(torch.arange(count, dtype=torch.float32))
