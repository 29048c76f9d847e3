"""Errors of hybrid models: parameters that cannot be placed, and trainers that do not match.

::

    ConfigurationError
    ├── PlacementError    a parameter cannot be placed as requested
    └── TrainersDiffer    a trainer has another model, or was told something else
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PlacementError(ConfigurationError):
    """A parameter cannot be placed as requested; nothing was moved.

    Attributes:
        parameter: Name of the parameter, or of its module.
    """

    parameter: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TrainersDiffer(ConfigurationError):
    """A trainer has another model than the first one, or other arguments; nothing was moved.

    Attributes:
        trainer: Name of the trainer.
        part: The part that differs: the name of a parameter, or of an argument.
    """

    trainer: str = ""
    part: str = ""
