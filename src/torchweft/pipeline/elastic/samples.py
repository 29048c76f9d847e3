"""The order in which the samples of an epoch come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchweft.arguments import checked_int
from torchweft.errors import ConfigurationError


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
