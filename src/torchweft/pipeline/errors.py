"""Errors of cutting a model into stages, and of stages that do not fit each other."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class CutError(ConfigurationError):
    """A model cannot be cut at the points that were named.

    Attributes:
        module: Name of the module in question, as in ``model.named_modules()``; empty for the
            model itself.
        place: File and line of the model's code, where they are known.
    """

    module: str = ""
    place: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class StageMismatch(ConfigurationError):
    """A stage cannot take the values that other stages and the batch give it.

    Attributes:
        stage: Number of the stage.
    """

    stage: int = -1
