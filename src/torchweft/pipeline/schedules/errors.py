"""The errors of schedules and tables: all are mistakes in arguments."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ConfigurationError


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
        waits_for: The action that it waits for, if it waits.
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
