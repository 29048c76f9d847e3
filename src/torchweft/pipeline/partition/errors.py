"""Errors of cutting a model into stages."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError


class PartitionError(ConfigurationError):
    """A model cannot be cut into stages as requested."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class DoesNotFit(PartitionError):
    """A layer, or every possible set of stages, needs more memory than the workers have.

    Attributes:
        first_layer: Index of the first layer that does not fit.
        last_layer: Index of the last layer of the same stage; the same for a single layer.
        needed_bytes: Memory that these layers need on one worker.
        limit_bytes: Memory that the worker may use.
    """

    first_layer: int = 0
    last_layer: int = 0
    needed_bytes: int = 0
    limit_bytes: int = 0
