"""Errors of weights by version: another model, and a delta that does not apply.

::

    ConfigurationError
    └── WeightsMismatch        a state has other tensors than the published one
    WeftError
    └── DeltaError (ValueError)   a delta is damaged, or belongs to another base
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError, WeftError


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WeightsMismatch(ConfigurationError):
    """The tensors of a state are not those of the published one; nothing has changed.

    Attributes:
        tensor: Name of the first tensor that differs.
        missing: Published names that the state lacks.
        unexpected: Names of the state that are not published.
    """

    tensor: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class DeltaError(WeftError, ValueError):
    """A delta is damaged, or was made for another base; whole weights are fetched instead."""
