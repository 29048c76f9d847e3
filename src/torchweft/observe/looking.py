"""One look at a group, compared with the look before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchweft.observe import rates as measured
from torchweft.observe import text
from torchweft.observe.group import Answers, Group
from torchweft.observe.waits import WaitGraph, explain
from torchweft.reports import DETAIL, REPORT, Report


class Looker:
    """Looks at a group again and again, and remembers the look before.

    Args:
        group: The group.
        timeout_s: How long to wait for each worker.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._before: dict[str, Report] = {}

    def look(self, worker: str | None = None) -> Look:
        """Asks all workers, in detail if one of them is opened. Blocks for the timeout at most."""
        answers = self._group.ask(self._timeout_s, REPORT if worker is None else DETAIL)
        count = len(self._group.workers)
        title = f"group {self._group.name}, {count} worker{'s' if count > 1 else ''}"
        seen = look_at(title, answers, self._before, worker)
        self._before = {report.worker: report for report in answers.reports}
        return seen

    def waits(self) -> str:
        """Says who waits for whom. Blocks for the timeout at most."""
        answers = self._group.ask(self._timeout_s)
        return explain(WaitGraph(answers.reports, answers.silent))

    def as_json(self, seen: Look) -> dict[str, Any]:
        """Returns a look for programs; unknown numbers are null."""
        told = {"group": self._group.name, "program": self._group.program, **seen.fields()}
        cleaned: dict[str, Any] = _without_nan(told)
        return cleaned


@dataclass(frozen=True)
class Look:
    """What was seen of a group at one moment, compared with an earlier one.

    Attributes:
        title: The name of the group, and the number of its workers.
        reports: The reports of the workers; of the opened one alone, if one is.
        rates: The workers.
        functions: Their functions, the most frequent first.
        silent: Why there is no report of each other worker.
        workers: The table of the workers.
        peers: The bytes of the opened worker; None in an overview.
        notes: What is wrong: workers that do not answer, and deadlocks.
    """

    title: str
    reports: list[Report]
    rates: list[measured.WorkerRate]
    functions: list[measured.FunctionRate]
    silent: dict[str, str]
    workers: text.Table
    peers: list[measured.PeerRate] | None
    notes: list[str]

    @property
    def numbers(self) -> list[text.Table]:
        """The numbers that components of workers tell; of an opened worker, also drawn."""
        drawn = self.reports if self.peers is not None else []
        tables = [table for report in drawn for table in text.histograms(report)]
        return text.number_tables(self.reports) + tables

    @property
    def opened(self) -> list[text.Table]:
        """The tables of the opened worker; none in an overview."""
        if self.peers is None:
            return []
        return [table for each in self.reports for table in text.worker_tables(each, self.peers)]

    @property
    def stacks(self) -> str:
        """The stacks of the opened worker; empty in an overview."""
        return "" if self.peers is None else "\n".join(map(text.stacks, self.reports))

    def parts(self) -> list[text.Table | str]:
        """Returns everything to print."""
        functions = [text.functions_table(self.functions)] if self.functions else []
        tables = [self.workers, *self.numbers, *functions, *self.opened]
        return [self.title, *tables, *self.notes, self.stacks]

    def fields(self) -> dict[str, Any]:
        """Returns everything as plain values."""
        told: dict[str, Any] = {
            "workers": [each.fields() for each in self.rates],
            "functions": [dataclasses.asdict(each) for each in self.functions],
            "numbers": [
                {"worker": report.worker, **dataclasses.asdict(table)}
                for report in self.reports
                for table in report.numbers
            ],
            "silent": self.silent,
            "notes": self.notes,
        }
        if self.peers is not None:
            told["peers"] = [dataclasses.asdict(each) for each in self.peers]
            for report in self.reports:
                told["report"] = dataclasses.asdict(report)
        return told


def look_at(
    title: str, answers: Answers, before: Mapping[str, Report], worker: str | None = None
) -> Look:
    """Returns what is seen of a group.

    Args:
        title: Names the group.
        answers: The answers of its workers.
        before: Earlier reports, by worker.
        worker: The worker that is opened; None for an overview.
    """
    chosen = [each for each in answers.reports if worker in (None, each.worker)]
    silent = {name: why for name, why in answers.silent.items() if worker in (None, name)}
    notes = [f"{name} {why}" for name, why in silent.items()]
    found = [measured.rate(each, before.get(each.worker)) for each in chosen]
    peers = None
    if worker is None:
        for circle in WaitGraph(answers.reports, answers.silent).circles():
            names = ", ".join(dict.fromkeys(each.worker for each in circle if each.worker))
            perhaps = "" if all(each.is_sure for each in circle) else "perhaps "
            notes.append(f"{perhaps}a deadlock of {names}: see torchweft top --waits")
    else:
        peers = [each for report in chosen for each in measured.peers(report, before.get(worker))]
    table = text.workers_table(found, silent, answers.lost)
    return Look(
        title, chosen, found, measured.functions(chosen, before), silent, table, peers, notes
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
