"""Runs PyTorch's own RPC tests on Weft.

``python -m tests.contract.conformance.run [SUBSTRING ...]``
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.contract.conformance import comparing, report, suite, table
from tests.contract.conformance.cases import CaseName, Result, Verdict, select, verdicts_of
from tests.contract.conformance.comparing import needs_gpu
from tests.contract.conformance.display import Display
from tests.contract.conformance.lists import EXPECTED, Baseline, Expected, read_categories
from tests.contract.conformance.running import Runner, default_jobs

DONE, WRONG, NOTHING_RUN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the requested tests and reports the results; returns the exit code."""
    options = _parse(arguments)
    # A terminated runner must end its tests, which are in process groups of their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin = time.monotonic()
    try:
        classes = suite.load(options.limit)
    except suite.NotInstalled as error:
        print(error, file=sys.stderr)
        return NOTHING_RUN
    catalogue = suite.catalogue(classes)
    wanted = select(catalogue, options.patterns)
    baseline = Baseline.read()
    if not wanted and not select(baseline.tests, options.patterns):
        print(f"no test is named like {' or '.join(options.patterns)}", file=sys.stderr)
        return NOTHING_RUN
    uses_gpu = _uses_gpu(wanted)
    if uses_gpu and not suite.can_use_gpu_in_children():
        print(
            "this process has initialised CUDA, so tests cannot fork workers that use a GPU; is "
            "the library of NVML (libnvidia-ml) missing?",
            file=sys.stderr,
        )
        return NOTHING_RUN
    options.jobs = options.jobs or default_jobs(uses_gpu)
    runner = Runner(classes, options.logs, options.jobs, options.limit)
    verdicts = verdicts_of(_run(runner, comparing.longest_first(wanted, baseline), options))
    code = _report(baseline, verdicts, catalogue, options)
    print(f"{time.monotonic() - begin:.0f} s, {options.jobs} side by side; logs: {options.logs}/")
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contract.conformance.run",
        description="Runs PyTorch's own RPC tests, which the torch wheel brings along, on Weft, "
        "and compares with tests/contract/conformance/expected.csv.",
    )
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="SUBSTRING",
        help="part of a name such as tp.RpcTest.test_add",
    )
    parser.add_argument(
        "-j",
        dest="jobs",
        type=int,
        metavar="N",
        help="tests side by side; fewer where a GPU is used",
    )
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds for one test")
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("runs/conformance"),
        metavar="DIR",
        help="what tests write",
    )
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run all so many times")
    parser.add_argument(
        "--update",
        action="store_true",
        help="add new passes to expected.csv and migration.md",
    )
    return parser.parse_args(arguments)


def _uses_gpu(wanted: Sequence[CaseName]) -> bool:
    categories = read_categories()
    return suite.gpu_count() > 0 and any(needs_gpu(case, categories) for case in wanted)


def _run(runner: Runner, cases: Sequence[CaseName], options: argparse.Namespace) -> list[Result]:
    categories = read_categories()
    display = Display(len(cases) * options.repeat, categories, every_line=bool(options.patterns))
    results = []
    with contextlib.closing(runner.run(cases, options.repeat)) as running:
        for result in running:
            results.append(result)
            display.show(result, runner.running)
    display.close()
    return results


def _report(
    baseline: Baseline,
    verdicts: Sequence[Verdict],
    catalogue: Sequence[CaseName],
    options: argparse.Namespace,
) -> int:
    """Prints tables and findings; returns the exit code."""
    import torch

    version = torch.__version__.partition("+")[0]
    categories = read_categories()
    if suite.SIDE == "torch":  # the list is of Weft; PyTorch passes its own tests
        baseline = Baseline(version, {verdict.case: Expected("pass") for verdict in verdicts})
    comparison = comparing.compare(baseline, verdicts, catalogue, categories, options.patterns)
    print()
    if verdicts:
        print(*table.tables(verdicts, comparison, categories), sep="\n")
    for line in table.findings(comparison, baseline.torch, version):
        print(line)
    if _uses_gpu([verdict.case for verdict in verdicts]):
        print(*table.gpu_summary(verdicts, categories), sep="\n")
    print()
    if options.update and suite.SIDE == "weft":
        comparing.updated(baseline, verdicts, catalogue, version).write()
        report.main(["--write"])
        print(f"written: {EXPECTED}, {report.PAGE}")
    return WRONG if comparison.is_error else DONE


if __name__ == "__main__":
    sys.exit(main())
