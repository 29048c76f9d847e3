"""What a question consists of: sides that are compared, and rows of what they do.

A question's folder holds its ``question.py``, which imports no torch, and its ``work.py``, which
only the worker processes import, after they have been pinned to their cores.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.frame.figures import Rounds
from benchmarks.frame.placement import Cores
from benchmarks.frame.targets import Target
from benchmarks.frame.units import MICROSECONDS, Unit


@dataclass(frozen=True)
class Side:
    """One of the sides of a comparison.

    Attributes:
        name: What reports and ``--sides`` call it.
        runner: How its processes meet: ``rpc`` (a group of workers; ``work.works(api)`` at
            the first), ``raw`` (a Unix socket between the first and each other;
            ``work.NAME_works(connections)`` at the first, ``work.serve_NAME(connection)`` at the
            others) or ``alone`` (one process; ``work.NAME_works()``). In NAME, a blank is a "_".
        api: ``torch`` or ``weft``, for the runner ``rpc``.
        environment: Variables set for its processes only.
        options: Arguments of the backend's options class, for the runner ``rpc``.
        options_by_rank: What each worker has besides, such as the address at which it listens.
        prefixes: A command to put before each worker's own, such as ``ip netns exec NAME``.
        address: Where the first worker can be reached.
        module: What must be importable; the side is skipped, saying so, where it is not.
        is_default: Whether it takes part unless ``--sides`` says otherwise.
    """

    name: str
    runner: Literal["rpc", "raw", "alone"] = "rpc"
    api: Literal["torch", "weft", ""] = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    options_by_rank: Sequence[Mapping[str, Any]] = ()
    prefixes: Sequence[Sequence[str]] = ()
    address: str = "127.0.0.1"
    module: str = ""
    is_default: bool = True


TORCH = Side("torch", api="torch")
WEFT = Side("weft", api="weft")
RAW = Side("raw", runner="raw")


@dataclass(frozen=True)
class Row:
    """A line of the result: something that is done again and again on every side that can.

    Attributes:
        name: Unique in the question; also what ``work.py`` calls it, unless ``work`` says.
        title: What reports call it.
        operations: Operations of one round on one side; ``--scale`` multiplies it.
        unit: How the numbers are shown.
        amount: What one operation moves, for a unit that is a rate.
        activity: What the main threads of all workers but the first do meanwhile: nothing,
            ``python`` or ``kernels`` (see ``activities.py``).
        work: Name of the work, where several rows share one.
        ours: The side that is judged.
        torch: The side it is compared with.
        limit: The side that shows what the machine allows at best.
        targets: What is demanded.
        is_short: Whether it is part of the short form.
        warm_up: Operations before the measurement.
        size: Workers of the group, where the row needs another number than the question says.
        check: Name of a ``work.Numbers`` that all sides are asked for before anything is timed;
            unless they tell the same, the row fails and is not measured.
    """

    name: str
    title: str
    operations: int = 300
    unit: Unit = MICROSECONDS
    amount: float = 1.0
    activity: Literal["", "python", "kernels"] = ""
    work: str = ""
    ours: str = "weft"
    torch: str = "torch"
    limit: str = "raw"
    targets: Sequence[Target] = ()
    is_short: bool = False
    warm_up: int = 20
    size: int = 0
    check: str = ""

    @property
    def work_name(self) -> str:
        return self.work or self.name


@dataclass(frozen=True)
class Form:
    """How long a run takes: the full form, or the short one of ``python -m benchmarks``."""

    rounds: int
    scale: float = 1.0
    placements: Sequence[str] = ()


FULL = Form(rounds=10)
SHORT = Form(rounds=5, scale=0.5, placements=("a core each",))

Measure = Callable[["Question", Namespace, Cores], Rounds]
"""Measures a question in one placement, where alternating between living sides does not do."""


@dataclass(frozen=True)
class Question:
    """A folder of benchmarks that answers one question.

    Attributes:
        folder: The package, such as ``benchmarks.calls``.
        title: Heading of its reports.
        rows: What is measured.
        sides: Who takes part, in the order of the reports.
        size: Workers of a group.
        about: A sentence for the head of a report.
        full: The default form.
        short: The short form.
        measure: Replaces the alternating rounds.
    """

    folder: str
    title: str
    rows: Sequence[Row]
    sides: Sequence[Side] = (TORCH, WEFT, RAW)
    size: int = 2
    about: str = ""
    full: Form = FULL
    short: Form = SHORT
    measure: Measure | None = None

    @property
    def name(self) -> str:
        return self.folder.rpartition(".")[2]
