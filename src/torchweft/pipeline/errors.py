"""Errors of cutting a model into stages, of stages that do not fit, and of their results."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError, PipelineError


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


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class NotFinite(PipelineError):
    """Values became NaN or infinite in a stage, which a pipeline with ``check_finite`` looks for.

    ``stage``, ``worker`` and ``microbatch`` say where. The micro-batch is -1 for the gradient of a
    weight in a step, which is checked when all micro-batches are done.

    Attributes:
        action: ``"forward"``, ``"backward"``, ``"backward to the inputs"`` or ``"update"``.
        value: Which value of the stage, such as ``"output for stage 2"``, ``"loss"``, ``"input from
            the batch"`` or ``"gradient of weight '0.bias'"``.
        n_nan: How many of its elements are NaN.
        n_infinite: How many are infinite.
    """

    action: str = ""
    value: str = ""
    n_nan: int = 0
    n_infinite: int = 0
