"""What changes from epoch to epoch: the order of the samples, and the layers that are frozen.

After He et al. 2021, "PipeTransformer: Automated Elastic Pipelining for Distributed Training of
Transformers": the first layers of a network converge first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweft.arguments import checked_int
from torchweft.errors import ConfigurationError
from torchweft.pipeline.partition import balance


class Samples:
    """The numbers of all samples in batches, each sample once an epoch, in a new order each time.

    The order follows from the seed and the epoch. ``state_dict`` has the place in it, so training
    resumes in the middle of an epoch, on any number of workers::

        while samples.epoch < 10:
            for chosen in samples:  # those that are left of this epoch
                pipe.step(images[chosen], digits[chosen], samples=chosen)

    Args:
        count: The number of samples.
        batch: The samples of a batch; those left over from whole batches are not seen in the epoch.
        seed: Where random numbers start.

    Raises:
        ConfigurationError: There are fewer samples than a batch has.
    """

    def __init__(self, count: int, batch: int, seed: int = 0) -> None:
        self._count = checked_int("count", count)
        self._batch = checked_int("batch", batch)
        self._seed = checked_int("seed", seed)
        if not 1 <= self._batch <= self._count:
            raise ConfigurationError(
                f"batch is {batch} and there are {count} samples; pass a batch of 1 to {count}"
            )
        self.epoch = 0
        self._n_batches = 0
        self._ordered: tuple[int, int, Tensor] = (seed, -1, torch.empty(0, device="cpu"))

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self._count // self._batch

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the batches that are left of this epoch, int64, shape ``(batch,)``.

        A batch counts as done as soon as it is yielded. If a state is loaded meanwhile, the next
        batch follows from that.
        """
        while self._n_batches < len(self):
            first = self._n_batches * self._batch
            self._n_batches += 1
            yield self._order()[first : first + self._batch]
        self.epoch, self._n_batches = self.epoch + 1, 0

    def _order(self) -> Tensor:
        if self._ordered[:2] != (self._seed, self.epoch):
            # torch's generator takes 32 bits of a seed.
            seed = random.Random((self._seed << 32) + self.epoch).getrandbits(32)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self._count, generator=generator, device="cpu")
            self._ordered = (self._seed, self.epoch, order)
        return self._ordered[2]

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the epoch, and the seed."""
        return {"epoch": self.epoch, "batches": self._n_batches, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place, and the seed."""
        self.epoch, self._n_batches = state["epoch"], state["batches"]
        self._seed = state["seed"]


class Freezing(Protocol):
    """Says how many layers, from the first on, are frozen after an epoch."""

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on.

        Args:
            epoch: How many epochs have been done.
            n_frozen: How many layers are frozen already; a smaller result counts as this number.
            norms: The norm of the gradients of each layer in the last step: 0 for frozen layers,
                infinite for those without weights.
        """


@dataclass(frozen=True)
class FreezeFraction:
    """Freezes a fraction of the layers that still train, at fixed epochs.

    Args:
        fraction: The fraction, above 0 and below 1; a part of a layer is rounded down.
        first: The epoch after which layers are frozen for the first time.
        every: Epochs between two times.

    Raises:
        ConfigurationError: A number is out of range.
    """

    fraction: float = 1 / 3
    first: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        if self.first < 1 or self.every < 1:
            raise ConfigurationError(
                f"first is {self.first} and every is {self.every}; pass numbers of epochs, 1 or "
                "more"
            )

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        if epoch < self.first or (epoch - self.first) % self.every:
            return n_frozen
        return _grown(n_frozen, len(norms), self.fraction)


@dataclass(frozen=True)
class FreezeByNorm:
    """Freezes up to the layer whose gradient is smallest, and at most a fraction at a time.

    Args:
        fraction: The largest fraction of the layers that still train, above 0 and below 1.

    Raises:
        ConfigurationError: The fraction is out of range.
    """

    fraction: float = 1 / 3

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        smallest = min(range(n_frozen, len(norms)), key=norms.__getitem__)
        return min(_grown(n_frozen, len(norms), self.fraction), smallest)


@dataclass(frozen=True)
class FreezeAt:
    """Freezes given numbers of layers after given epochs.

    Args:
        layers: By epoch, the number of frozen layers.
    """

    layers: Mapping[int, int]

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        return max(n_frozen, self.layers.get(epoch, 0))


def _grown(n_frozen: int, n_layers: int, fraction: float) -> int:
    return n_frozen + int((n_layers - n_frozen) * fraction + 1e-9)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigurationError(f"fraction is {fraction}; pass a number above 0 and below 1")


def largest_part(costs: Sequence[float], n_parts: int) -> float:
    """Returns the cost of the largest part if layers are cut as evenly as possible."""
    bounds = [0, *balance(costs, n_parts), len(costs)]
    return max(sum(costs[first:second]) for first, second in pairwise(bounds))


def choose_length(costs: Sequence[float], n_workers: int, limit: float) -> int:
    """Returns the number of stages for the layers that still train.

    It is the smallest number for which no stage costs more than ``limit``. It divides the number of
    workers, so that each stage has the same number of replicas.

    Args:
        costs: The costs of the layers that still train.
        n_workers: The number of workers.
        limit: The cost of the largest stage when nothing was frozen.
    """
    lengths = [each for each in range(1, n_workers + 1) if n_workers % each == 0]
    possible = [each for each in lengths if each <= len(costs)]
    fitting = (each for each in possible if largest_part(costs, each) <= limit * (1 + 1e-9))
    return next(fitting, possible[-1])
