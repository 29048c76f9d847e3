"""Errors of cuts, schedules, plans and results: all but ``NotFinite`` are mistakes in arguments."""

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


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class ScheduleError(ConfigurationError):
    """A schedule cannot be used with this number of workers or micro-batches.

    Attributes:
        schedule: Name of the schedule's class.
        n_workers: The number of workers.
        n_stages: The number of stages that the schedule has on them.
        n_microbatches: The number of micro-batches or minibatches; None where it is not known.
    """

    schedule: str = ""
    n_workers: int = 0
    n_stages: int = 0
    n_microbatches: int | None = None


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TableError(ConfigurationError):
    """A table cannot be run: an action is missing, is there twice, or waits for ever.

    Attributes:
        worker: The worker concerned; None where no worker has the action.
        position: Place of the action in the worker's row, counted from 0; None where it has none.
        action: The action, as ``"1F3"``.
        waits_for: The result that it waits for, if it waits, written like an action: ``"1I3"`` is
            the gradient of the input of stage 1.
    """

    worker: int | None = None
    position: int | None = None
    action: str = ""
    waits_for: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class CellError(ConfigurationError):
    """A cell of a table in CSV form cannot be read.

    Attributes:
        row: Row of the cell, which is its worker, counted from 0.
        column: Column of the cell, counted from 0.
        cell: Its text.
    """

    row: int = 0
    column: int = 0
    cell: str = ""


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
