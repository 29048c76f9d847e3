"""One target in a process of its own, started by ``python -m tests.fuzz``."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from pathlib import Path

from tests.fuzz import mutational, targets
from tests.fuzz.campaign import Plan
from tests.fuzz.last_input import LastInput

_ADDRESS_SPACE_BYTES = 12 << 30


def main(arguments: list[str]) -> None:
    """Runs the engine, target and plan that the parent passes as arguments."""
    engine, name, frames, bare, seconds, seed, corpus, findings, folder = arguments
    faulthandler.enable()
    # An input that takes memory without end fails, and does not stop the machine. A sanitizer
    # reserves terabytes of addresses.
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    plan = Plan(
        int(frames),
        float(seconds),
        int(seed),
        Path(corpus) if corpus else None,
        Path(findings),
        int(bare),
    )
    report, last_input = Path(folder) / "report", LastInput(Path(folder) / "last")
    if engine == mutational.NAME:
        mutational.fuzz(targets.load(name), plan, last_input).write(report)
    else:
        from tests.fuzz import guided

        guided.fuzz(name, plan, report, last_input)


if __name__ == "__main__":
    main(sys.argv[1:])
