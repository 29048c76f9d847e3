"""``torchweft top`` and ``torchweft explain``: what workers do, and why they wait."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from torchweft import knobs
from torchweft.errors import ConfigurationError, ObserveError, ProtocolError, UnknownWorker
from torchweft.observe import rates, text
from torchweft.observe.files import age_note, read_folder
from torchweft.observe.group import Answers, Group, find
from torchweft.observe.session import Access
from torchweft.protocol.observing.report import Report
from torchweft.protocol.observing.waits import WaitGraph
from torchweft.protocol.observing.wording import as_json, explain

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1
DEADLOCK_STATUS = 3
"""Status of a command that has found a deadlock."""
_LEAST_INTERVAL_S = 0.1

TOP_DESCRIPTION = f"""\
Shows the workers of a running group: calls, times, bytes, references, and who waits for whom. It
joins nothing and changes nothing. GROUP is the name that a group has here, the process id or name
of a worker, or the address of one as tcp:HOST:PORT; it can be left out where one group runs on this
host. A group with a secret needs {knobs.SECRET_FILE.variable}, and one with TLS the variables
{knobs.TLS_CERT.variable}, {knobs.TLS_KEY.variable} and {knobs.TLS_CA.variable}, as its workers
do."""

TOP_EXAMPLES = """\
examples:
  torchweft top
  torchweft top --once
  torchweft top --waits
  torchweft top --worker trainer0 --once
  torchweft top --json | jq '.workers[].in_per_s'"""

EXPLAIN_DESCRIPTION = f"""\
Says where a group is stuck and why, from the files that its workers have written on SIGQUIT or
after a wait of {knobs.DUMP_AFTER_S.variable} seconds."""


def add_parsers(subcommands: Subparsers) -> None:
    """Adds the command lines of ``torchweft top`` and ``torchweft explain``."""
    top = subcommands.add_parser(
        "top",
        help="show what the workers of a running group do",
        usage="torchweft top [GROUP] [--once | --json] [--worker NAME | --waits] [--interval S]",
        description=TOP_DESCRIPTION,
        epilog=TOP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("group", nargs="?", default="", metavar="GROUP", help="which group")
    top.add_argument("--once", action="store_true", help="print once, as text, and end")
    top.add_argument("--json", action="store_true", help="print once, as JSON, and end")
    top.add_argument("--worker", metavar="NAME", help="open one worker: calls, stacks, references")
    top.add_argument(
        "--waits", action="store_true", help="say who waits for whom, find deadlocks, and end"
    )
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks"
    )
    top.add_argument(
        "--timeout", type=float, default=2.0, metavar="S", help="seconds to wait for each worker"
    )
    top.set_defaults(execute=run_top)
    explaining = subcommands.add_parser(
        "explain",
        help="say why a group is stuck, from what its workers have written",
        usage="torchweft explain FOLDER [--json]",
        description=EXPLAIN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    explaining.add_argument("folder", metavar="FOLDER", help="the folder that the workers named")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    explaining.set_defaults(execute=run_explain)


def run_top(options: argparse.Namespace) -> int:
    """Shows a group, and returns the exit status."""
    for name in ("interval", "timeout"):
        if not _LEAST_INTERVAL_S <= getattr(options, name) < math.inf:
            raise ConfigurationError(
                f"--{name} is {getattr(options, name)}; it is at least {_LEAST_INTERVAL_S} s"
            )
    try:
        group = find(options.group, Access.from_environment())
        if options.worker is not None and options.worker not in group.workers:
            raise UnknownWorker(
                f"the group has no worker {options.worker!r}; it has {', '.join(group.workers)}"
            )
        if options.waits:
            return _show_waits(group.ask(options.timeout), is_json=options.json)
        return _show(group, options)
    except (ObserveError, ProtocolError, UnknownWorker) as error:
        print(f"torchweft top: {error}", file=sys.stderr)
        return FAILURE_STATUS
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # As of a program whose output goes to ``head``.
        sys.stdout = None  # Python would complain at exit.
        return 0


def run_explain(options: argparse.Namespace) -> int:
    """Explains the files of a folder, and returns the exit status."""
    try:
        answers = read_folder(options.folder)
    except (ObserveError, ProtocolError) as error:
        print(f"torchweft explain: {error}", file=sys.stderr)
        return FAILURE_STATUS
    note = age_note(answers)
    if note:
        print(f"torchweft explain: {note}", file=sys.stderr)
    return _show_waits(answers, is_json=options.json)


def _show_waits(answers: Answers, *, is_json: bool) -> int:
    graph = WaitGraph(answers.reports, answers.silent)
    print(json.dumps(as_json(graph), indent=2) if is_json else explain(graph))
    return DEADLOCK_STATUS if graph.circles() else 0


def _show(group: Group, options: argparse.Namespace) -> int:
    looker = _Looker(group, options)
    if not (options.once or options.json) and sys.stdout.isatty():
        try:
            from torchweft.observe.live import show
        except ImportError:
            advice = "torchweft top: for a live display, pip install 'torchweft[progress]'"
            print(advice, file=sys.stderr)
        else:
            show(looker.look, options.interval)
            return 0
    looker.look()
    time.sleep(options.interval)
    seen = looker.look()
    print(json.dumps(seen.as_json(), indent=2) if options.json else seen.as_text())
    return 0


class _Looker:
    """Looks at a group again and again, and remembers the look before."""

    def __init__(self, group: Group, options: argparse.Namespace) -> None:
        self._group = group
        self._options = options
        self._before: dict[str, Report] = {}

    def look(self) -> Look:
        answers = self._group.ask(self._options.timeout, in_detail=self._options.worker is not None)
        seen = Look(self._group, answers, self._before, self._options.worker)
        self._before = {report.worker: report for report in answers.reports}
        return seen


class Look:
    """What was seen of a group at one moment, compared with an earlier one.

    Args:
        group: The group.
        answers: The answers of its workers.
        before: Earlier reports, by worker.
        worker: The worker that is opened; None for an overview.
    """

    def __init__(
        self, group: Group, answers: Answers, before: dict[str, Report], worker: str | None
    ) -> None:
        self._answers = answers
        self._worker = worker
        self._opened = [each for each in answers.reports if each.worker == worker]
        chosen = answers.reports if worker is None else self._opened
        self._chosen = chosen
        self._rates = [rates.rate(each, before.get(each.worker)) for each in chosen]
        self._functions = rates.functions(chosen, before)
        self._silent = {name: why for name, why in answers.silent.items() if worker in (None, name)}
        count = len(group.workers)
        self.title = f"group {group.name}, {count} worker{'s' if count > 1 else ''}"
        self._group = group

    def tables(self) -> list[text.Table]:
        """Returns the tables to show."""
        tables = [text.workers_table(self._rates, self._silent, self._answers.lost)]
        tables += text.number_tables(self._chosen)
        for report in self._opened:
            tables += text.histograms(report)
        if self._functions:
            tables.append(text.functions_table(self._functions))
        for report in self._opened:
            tables += text.worker_tables(report)
        return tables

    def notes(self) -> list[str]:
        """Returns what is wrong: workers that do not answer, and deadlocks."""
        notes = [f"{name} {why}" for name, why in self._silent.items()]
        if self._worker is None:
            circles = WaitGraph(self._answers.reports, self._answers.silent).circles()
            for circle in circles:
                names = ", ".join(dict.fromkeys(each.worker for each in circle if each.worker))
                perhaps = "" if all(each.is_sure for each in circle) else "perhaps "
                notes.append(f"{perhaps}a deadlock of {names}: see torchweft top --waits")
        return notes

    def stacks(self) -> str:
        """Returns the stacks of the opened worker."""
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
            "workers": [dataclasses.asdict(each) for each in self._rates],
            "functions": [dataclasses.asdict(each) for each in self._functions],
            "numbers": [
                {"worker": report.worker, **dataclasses.asdict(table)}
                for report in self._chosen
                for table in report.numbers
            ],
            "silent": self._silent,
            "notes": self.notes(),
        }
        if self._opened:
            told["report"] = dataclasses.asdict(self._opened[0])
        cleaned: dict[str, Any] = _without_nan(told)
        return cleaned


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
