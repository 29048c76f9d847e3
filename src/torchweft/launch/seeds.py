"""Seeds the random number generators of a forked worker: those of Python, NumPy and PyTorch.

A forked process inherits its parent's generators and their state. Python reseeds its own after a
fork. The generators of NumPy and PyTorch would produce the same numbers in every worker.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

from torchweft.errors import ArgumentTypeError, ConfigurationError

_NUMPY_BITS = 32
"""Bits of the seeds that NumPy's legacy generator takes."""


def check_seed(seed: int | None, argument: str = "seed") -> None:
    """Raises ConfigurationError if the seed is invalid."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(
            f"{argument} is a {type(seed).__name__}, {seed!r}; it must be an int, or None for "
            "different numbers in each run"
        )
    if seed < 0:
        raise ConfigurationError(f"{argument} is {seed}; it must be 0 or more")


def worker_seed(seed: int | None, name: str) -> int | None:
    """Returns the seed of one worker of a run: 63 bits, different for each name.

    Args:
        seed: The seed of the run; None if it has no seed.
        name: The worker's name.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int | None) -> None:
    """Seeds Python's generator, and those of NumPy and PyTorch if they have been imported.

    Args:
        seed: The worker's seed; None seeds each generator from the operating system.
    """
    loaded: dict[str, Any] = sys.modules
    random.seed(seed)
    if "numpy" in loaded and (seed is not None or "numpy.random" in loaded):
        # Without a seed, NumPy's generator seeds itself if it is imported later.
        import numpy

        numpy.random.seed(None if seed is None else seed % (1 << _NUMPY_BITS))
    if "torch" in loaded:
        torch = loaded["torch"]
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
