"""The part that both engines share: when to stop, what to count, how to report it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.findings import Findings
from tests.fuzz.last_input import LastInput
from tests.fuzz.target import Target

_TICK = 4096
"""The number of inputs between two checks of the clock."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run on one target.

    Attributes:
        frames: How many inputs to try.
        seconds: How long to try at most.
        seed: The seed of all random decisions.
        corpus: Folder of inputs to start from, to which interesting ones are added; None for the
            target's own seeds only.
        findings: Folder for the findings.
    """

    frames: int
    seconds: float = float("inf")
    seed: int = 0
    corpus: Path | None = None
    findings: Path | None = None


@dataclass
class Report:
    """The result of a run.

    Attributes:
        target: Name of the target.
        engine: Name of the engine.
        frames: How many inputs were tried.
        accepted: How many of them the decoder accepted.
        seconds: How long that took.
        reached: What the engine counts as different behaviours.
        findings: How many places in the code were found to be wrong.
    """

    target: str
    engine: str
    frames: int
    accepted: int
    seconds: float
    reached: int
    findings: int

    def line(self) -> str:
        """Returns the report as one line of a table."""
        rate = self.frames / max(self.seconds, 1e-9)
        return (
            f"{self.target:<18}{self.engine:<12}{self.frames:>12,}{self.accepted:>12,}"
            f"{self.seconds:>8.0f} s{rate:>9,.0f}/s{self.reached:>8}{self.findings:>6}"
        )

    def write(self, path: Path) -> None:
        """Writes the report for another process."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Report:
        """Reads what ``write`` wrote."""
        return Report(**json.loads(path.read_text()))


HEADING = (
    f"{'target':<18}{'engine':<12}{'frames':>12}{'accepted':>12}{'time':>10}{'rate':>11}"
    f"{'reached':>8}{'found':>6}"
)


class Campaign:
    """One run on one target, input by input.

    Args:
        target: What to try.
        plan: How much to try.
        last_input: Gets every input before it is tried, in case the input ends the process.
    """

    def __init__(self, target: Target, plan: Plan, last_input: LastInput | None = None) -> None:
        self._target = target
        self._plan = plan
        self._last_input = last_input
        self._begin_s = time.monotonic()
        self.findings = Findings(target.name, plan.findings)
        self.frames = 0
        self.accepted = 0
        self.is_over = False

    def try_one(self, data: bytes) -> BaseException | None:
        """Tries one input; returns its refusal, or the error of a finding, or None."""
        if self._last_input is not None:
            self._last_input.note(data)
        self.frames += 1
        if not self.frames % _TICK or self.frames >= self._plan.frames:
            elapsed_s = time.monotonic() - self._begin_s
            self.is_over = self.frames >= self._plan.frames or elapsed_s >= self._plan.seconds
        try:
            refusal = self._target.check(data)
        except Exception as error:
            self.findings.add(data, error)
            return error
        self.accepted += refusal is None
        return refusal

    def report(self, engine: str, reached: int) -> Report:
        """Returns the result so far."""
        return Report(
            self._target.name,
            engine,
            self.frames,
            self.accepted,
            time.monotonic() - self._begin_s,
            reached,
            len(self.findings.all),
        )


Engine = Callable[[Target, Plan, LastInput | None], Report]


def starting_inputs(target: Target, plan: Plan) -> list[bytes]:
    """Returns the target's seeds and the inputs of the corpus."""
    inputs = target.seeds()
    if plan.corpus is not None and plan.corpus.is_dir():
        inputs += [path.read_bytes() for path in sorted(plan.corpus.iterdir()) if path.is_file()]
    return inputs
