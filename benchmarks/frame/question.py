"""The parts of a question: the sides that it compares, and the rows that it measures.

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
        name: Name in reports and for ``--sides``.
        runner: How its processes connect: ``rpc`` (a group of workers; ``work.works(api)`` on
            the first), ``raw`` (a Unix socket between the first and each other process;
            ``work.NAME_works(connections)`` on the first, ``work.serve_NAME(connection)`` on the
            others), ``alone`` (one process; ``work.NAME_works()``), ``forked`` (``program.py``
            runs as a script and forks the other workers) or ``ranks`` (processes that ``join``,
            ``serve`` and ``leave`` of ``NAME_side.py`` connect; its ``works()`` on the first). In
            NAME, a blank is a "_".
        api: For the runners ``rpc`` and ``forked``: ``torch``, ``weft``, or ``compat``, which is
            torch's names with ``torchweft.compat`` behind them, for programs that import them.
        environment: Variables set for its processes only.
        options: Arguments of the backend's options class, for the runner ``rpc``.
        options_by_rank: Further options of each worker, such as its listening address.
        prefixes: A command to put before each worker's own, such as ``ip netns exec NAME``.
        address: Address of the first worker.
        module: A required module; if it cannot be imported, the side is skipped with a message.
        interpreter: The Python that runs its processes, of another environment; by default that of
            the benchmark.
        is_default: Whether it takes part unless ``--sides`` says otherwise.
    """

    name: str
    runner: Literal["rpc", "raw", "alone", "forked", "ranks"] = "rpc"
    api: Literal["torch", "weft", "compat", ""] = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    options_by_rank: Sequence[Mapping[str, Any]] = ()
    prefixes: Sequence[Sequence[str]] = ()
    address: str = "127.0.0.1"
    module: str = ""
    interpreter: str = ""
    is_default: bool = True


TORCH = Side("torch", api="torch")
WEFT = Side("weft", api="weft")
COMPAT = Side("compat", api="compat")
RAW = Side("raw", runner="raw")


@dataclass(frozen=True)
class Row:
    """A line of the result: a work that runs repeatedly on every side that has it.

    Attributes:
        name: Unique name in the question; also the work's name, unless ``work`` is given.
        title: Title in reports.
        operations: Operations of one round on one side; ``--scale`` multiplies it.
        unit: Unit of the displayed numbers.
        amount: Amount that one operation moves, for a unit that is a rate.
        activity: Activity of the main threads of all workers but the first meanwhile: none,
            ``python`` or ``kernels`` (see ``activities.py``).
        work: Name of the work in ``work.py``, if several rows share it.
        ours: The side that is judged.
        torch: The side it is compared with.
        limit: The side that shows the machine's limit.
        targets: Demands on the result.
        is_short: Whether it is part of the short form.
        warm_up: Operations before the measurement.
        size: Number of workers in the group, if it differs from the question's.
        check: Name of a ``work.Numbers`` that all sides return before timing starts; if the
            numbers differ, the row fails and is not measured.
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
    """The length of a run: the full form, or the short form of ``python -m benchmarks``."""

    rounds: int
    scale: float = 1.0
    placements: Sequence[str] = ()


FULL = Form(rounds=10)
SHORT = Form(rounds=5, scale=0.5, placements=("a core each",))

Measure = Callable[["Question", Namespace, Cores], Rounds]
"""Measures a question in one placement, if alternating between running sides is unsuitable."""


@dataclass(frozen=True)
class Question:
    """A folder of benchmarks that answers one question.

    Attributes:
        folder: The package, such as ``benchmarks.calls``.
        title: Heading of its reports.
        rows: The rows to measure.
        sides: The compared sides, in the order of the reports.
        size: Number of workers in a group.
        about: A sentence for the head of a report.
        full: The default form.
        short: The short form.
        measure: Replaces the alternating rounds.
        mean: Demand on the geometric mean of all rows' ratios to torch RPC; 0 for none.
        limit_s: Time that a side may take for one round of a row, and no more than that.
        is_possible: Returns whether this machine has what the question needs; it may be chosen
            by name in any case.
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
    mean: float = 0.0
    limit_s: float = 60.0
    is_possible: Callable[[], bool] = lambda: True

    @property
    def name(self) -> str:
        return self.folder.rpartition(".")[2]
