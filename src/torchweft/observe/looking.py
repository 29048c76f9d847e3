"""One look at a group, compared with the look before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torchweft.observe import rates, text
from torchweft.observe.group import Answers, Group
from torchweft.observe.report import DETAIL, REPORT, Report
from torchweft.observe.waits import WaitGraph, explain


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

    @property
    def workers(self) -> list[str]:
        """The names of the workers, by rank."""
        return self._group.workers

    def look(self, worker: str | None = None) -> Look:
        """Asks all workers, in detail if one of them is opened. Blocks for the timeout at most."""
        answers = self._group.ask(self._timeout_s, REPORT if worker is None else DETAIL)
        seen = Look(self._group, answers, self._before, worker)
        self._before = {report.worker: report for report in answers.reports}
        return seen

    def waits(self) -> str:
        """Says who waits for whom. Blocks for the timeout at most."""
        answers = self._group.ask(self._timeout_s)
        return explain(WaitGraph(answers.reports, answers.silent))


class Look:
    """What was seen of a group at one moment, compared with an earlier one.

    Args:
        group: The group.
        answers: The answers of its workers.
        before: Earlier reports, by worker.
        worker: The worker that is opened; None for an overview.

    Attributes:
        title: The name of the group, and the number of its workers.
        rates: The workers.
        functions: Their functions, the most frequent first.
        silent: Why there is no report of each other worker.
    """

    def __init__(
        self,
        group: Group,
        answers: Answers,
        before: Mapping[str, Report],
        worker: str | None = None,
    ) -> None:
        self._group = group
        self._answers = answers
        self._worker = worker
        self._opened = [each for each in answers.reports if each.worker == worker]
        self._before = before.get(worker or "")
        self._chosen = chosen = answers.reports if worker is None else self._opened
        self.rates = [rates.rate(each, before.get(each.worker)) for each in chosen]
        self.functions = rates.functions(chosen, before)
        self.silent = {name: why for name, why in answers.silent.items() if worker in (None, name)}
        count = len(group.workers)
        self.title = f"group {group.name}, {count} worker{'s' if count > 1 else ''}"

    def workers_table(self) -> text.Table:
        """Returns a row for each worker."""
        return text.workers_table(self.rates, self.silent, self._answers.lost)

    def tables(self) -> list[text.Table]:
        """Returns the tables to show."""
        tables = [self.workers_table(), *self.number_tables()]
        if self.functions:
            tables.append(text.functions_table(self.functions))
        return tables + self.opened_tables()

    def number_tables(self) -> list[text.Table]:
        """Returns the numbers that components of workers tell; of an opened worker, also drawn."""
        drawn = [table for report in self._opened for table in text.histograms(report)]
        return text.number_tables(self._chosen) + drawn

    def opened_tables(self) -> list[text.Table]:
        """Returns the tables of the opened worker; none in an overview."""
        return [
            table
            for report in self._opened
            for table in text.worker_tables(report, rates.peers(report, self._before))
        ]

    def notes(self) -> list[str]:
        """Returns what is wrong: workers that do not answer, and deadlocks."""
        notes = [f"{name} {why}" for name, why in self.silent.items()]
        if self._worker is None:
            circles = WaitGraph(self._answers.reports, self._answers.silent).circles()
            for circle in circles:
                names = ", ".join(dict.fromkeys(each.worker for each in circle if each.worker))
                perhaps = "" if all(each.is_sure for each in circle) else "perhaps "
                notes.append(f"{perhaps}a deadlock of {names}: see torchweft top --waits")
        return notes

    def stacks(self) -> str:
        """Returns the stacks of the opened worker; empty in an overview."""
        return "\n".join(map(text.stacks, self._opened))

    def as_text(self) -> str:
        """Returns everything as text."""
        parts = [self.title, *map(text.drawn, self.tables()), *self.notes(), self.stacks()]
        return "\n\n".join(filter(None, parts))

    def as_json(self) -> dict[str, Any]:
        """Returns everything for programs; unknown numbers are null."""
        told: dict[str, Any] = {
            "group": self._group.name,
            "program": self._group.program,
            "workers": [dataclasses.asdict(each) for each in self.rates],
            "functions": [dataclasses.asdict(each) for each in self.functions],
            "numbers": [
                {"worker": report.worker, **dataclasses.asdict(table)}
                for report in self._chosen
                for table in report.numbers
            ],
            "silent": self.silent,
            "notes": self.notes(),
        }
        for report in self._opened:
            told["peers"] = [dataclasses.asdict(each) for each in rates.peers(report, self._before)]
            told["report"] = dataclasses.asdict(report)
        cleaned: dict[str, Any] = _without_nan(told)
        return cleaned


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
