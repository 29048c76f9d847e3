"""``python -m tests.fuzz TARGET...|all``: tries made-up bytes on everything that decodes some."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.fuzz import mutational
from tests.fuzz.campaign import HEADING, Plan, Report
from tests.fuzz.findings import Finding
from tests.fuzz.last_input import read_last_input
from tests.fuzz.targets import NAMES

NOTHING_FOUND, FOUND = 0, 1
_GUIDED = "guided"
_COVERAGE = re.compile(r"\bcov: (\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the requested targets, one after the other; returns the exit code."""
    options = _parse(arguments)
    names = NAMES if "all" in options.targets else options.targets
    engine = options.engine or _usual_engine(options.bare)
    print(HEADING, flush=True)
    reports = []
    for name in names:
        corpus = options.corpus / name if options.corpus else None
        plan = Plan(
            *(options.frames, options.seconds, options.seed, corpus, options.findings, options.bare)
        )
        report = _run(engine, name, plan)
        print(report.line(), flush=True)
        reports.append(report)
    frames, bare = sum(r.frames for r in reports), sum(r.bare for r in reports)
    seconds = sum(r.seconds + r.bare_seconds for r in reports)
    found = sum(r.findings for r in reports)
    print(f"{frames:,} frames, {bare:,} bare, {seconds:.0f} s, {found} found")
    return FOUND if found else NOTHING_FOUND


def _usual_engine(bare: int) -> str:
    is_guided = bare == 0 and importlib.util.find_spec("atheris") is not None
    return _GUIDED if is_guided else mutational.NAME


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=[*NAMES, "all"], metavar="TARGET")
    parser.add_argument(
        "--frames", type=int, default=100_000, metavar="N", help="inputs for each target"
    )
    parser.add_argument(
        "--bare",
        type=int,
        default=0,
        metavar="N",
        help="further inputs, for the twin in C alone, for each target that has one",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="at most, for each target"
    )
    parser.add_argument("--seed", type=int, default=0, help="another one tries other inputs")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="where interesting inputs are kept between runs"
    )
    parser.add_argument(
        "--findings", type=Path, default=Path("runs/fuzz"), metavar="DIR", help="what was found"
    )
    parser.add_argument(
        "--engine",
        choices=[_GUIDED, mutational.NAME],
        help="guided needs atheris, has no bare inputs, and is the default for the others where "
        "atheris is installed",
    )
    options = parser.parse_args(arguments)
    if options.bare and options.engine == _GUIDED:
        parser.error("--bare is for the engine mutational")
    return options


def _run(engine: str, name: str, plan: Plan) -> Report:
    """Runs one target in a process of its own, which an input may kill."""
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "tests.fuzz.child", engine, name]
        command += [str(plan.frames), str(plan.bare), str(plan.seconds), str(plan.seed)]
        command += [str(plan.corpus or ""), str(plan.findings)]
        with open(log, "w") as output:
            code = subprocess.run([*command, folder], stdout=output, stderr=output).returncode
        said = log.read_text(errors="replace")
        report = Path(folder) / "report"
        if code or not report.exists():
            return _died(engine, name, plan, Path(folder), f"exit code {code}\n\n{said[-4000:]}")
        coverage = _COVERAGE.findall(said)
        told = Report.read(report)
        return replace(told, reached=int(coverage[-1])) if coverage else told


def _died(engine: str, name: str, plan: Plan, folder: Path, text: str) -> Report:
    """Reports that an input has ended the process."""
    last = folder / "last"
    finding = Finding(name, read_last_input(last) if last.exists() else b"", text)
    assert plan.findings is not None
    print(f"{name}: the process has died; see {finding.write(plan.findings)}.txt", flush=True)
    return Report(name, engine, 0, 0, 0.0, 0, 1)


if __name__ == "__main__":
    sys.exit(main())
