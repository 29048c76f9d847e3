"""Seeds the random number generators of a forked worker: those of Python, NumPy and PyTorch.

A forked process has its parent's generators, with their state. Python makes its own anew in a
fork; those of NumPy and PyTorch would go on alike in every worker.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

from torchweft.errors import ArgumentTypeError, ConfigurationError

_NUMPY_BITS = 32
"""Length of the seeds that NumPy's legacy generator takes."""


def check_seed(seed: int | None, argument: str = "seed") -> None:
    """Raises ConfigurationError where a run cannot have this seed."""
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
    """Returns the seed of one worker of a run: 63 bits, another one for each name.

    Args:
        seed: The seed of the run; None where there is none.
        name: The worker's name.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int | None) -> None:
    """Seeds the generators of Python and of what has been imported of NumPy and PyTorch.

    Args:
        seed: The worker's seed; None takes one for each from the operating system.
    """
    loaded: dict[str, Any] = sys.modules
    random.seed(seed)
    if "numpy" in loaded and (seed is not None or "numpy.random" in loaded):
        # Without a seed, NumPy's generator seeds itself where it is imported later.
        import numpy

        numpy.random.seed(None if seed is None else seed % (1 << _NUMPY_BITS))
    if "torch" in loaded:
        torch = loaded["torch"]
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)
