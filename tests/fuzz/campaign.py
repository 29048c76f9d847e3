"""The part that both engines share: when to stop, what to count, how to report it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.findings import Findings
from tests.fuzz.last_input import LastInput
from tests.fuzz.target import Bare, Target

_TICK = 4096
"""The number of inputs between two checks of the clock."""
_LARGEST_LOT = 4096
_FAULTS = (SystemError, AssertionError, MemoryError)
"""Errors that are no refusal: C has broken a rule of the interpreter, or of the target."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run on one target.

    Attributes:
        frames: How many inputs to try whole, that is, by the target's ``run``.
        seconds: How long to try at most.
        seed: The seed of all random decisions.
        corpus: Folder of inputs to start from, to which interesting ones are added; None for the
            target's own seeds only.
        findings: Folder for the findings.
        bare: How many further inputs to give to the target's ``bare``, if it has one.
    """

    frames: int
    seconds: float = float("inf")
    seed: int = 0
    corpus: Path | None = None
    findings: Path | None = None
    bare: int = 0


@dataclass
class Report:
    """The result of a run.

    Attributes:
        target: Name of the target.
        engine: Name of the engine.
        frames: How many inputs were tried whole.
        accepted: How many of them the decoder accepted.
        seconds: How long that took.
        reached: What the engine counts as different behaviours.
        findings: How many places in the code were found to be wrong.
        bare: How many further inputs the twin in C alone got.
        bare_accepted: How many of them it accepted.
        bare_seconds: How long that took.
    """

    target: str
    engine: str
    frames: int
    accepted: int
    seconds: float
    reached: int
    findings: int
    bare: int = 0
    bare_accepted: int = 0
    bare_seconds: float = 0.0

    def line(self) -> str:
        """Returns the report as one line of a table."""
        return (
            f"{self.target:<18}{self.engine:<12}"
            f"{_counted(self.frames, self.accepted, self.seconds)}"
            f"{_counted(self.bare, self.bare_accepted, self.bare_seconds)}"
            f"{self.reached:>8}{self.findings:>6}"
        )

    def write(self, path: Path) -> None:
        """Writes the report for another process."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Report:
        """Reads what ``write`` wrote."""
        return Report(**json.loads(path.read_text()))


def _counted(inputs: int, accepted: int, seconds: float) -> str:
    rate = inputs / max(seconds, 1e-9)
    return f"{inputs:>12,}{accepted:>12,}{seconds:>8.0f} s{rate:>9,.0f}/s"


HEADING = (
    f"{'target':<18}{'engine':<12}{'frames':>12}{'accepted':>12}{'time':>10}{'rate':>11}"
    f"{'bare':>12}{'accepted':>12}{'time':>10}{'rate':>11}{'reached':>8}{'found':>6}"
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
        self.bare = 0
        self.bare_accepted = 0
        self._bare_s = 0.0
        self._is_late = False
        self._bare_planned = 0 if target.bare is None else plan.bare

    @property
    def lot(self) -> int:
        """How many bare inputs to try with each two of the others, so that both end together."""
        left = self._bare_planned - self.bare
        pairs_left = max((self._plan.frames - self.frames) // 2, 1)
        return max(min(-(-left // pairs_left), left, _LARGEST_LOT), 0)

    @property
    def is_over(self) -> bool:
        """Whether all planned inputs were tried, or the time is up."""
        is_done = self.frames >= self._plan.frames and self.bare >= self._bare_planned
        return is_done or self._is_late

    def try_one(self, data: bytes) -> BaseException | None:
        """Tries one input; returns its refusal, or the error of a finding, or None."""
        if self._last_input is not None:
            self._last_input.note(data)
        self.frames += 1
        if not self.frames % _TICK:
            self._look_at_clock()
        try:
            refusal = self._target.check(data)
        except Exception as error:
            self.findings.add(data, error)
            return error
        self.accepted += refusal is None
        return refusal

    def try_lot(self, inputs: Iterable[bytes]) -> bytes:
        """Gives inputs to the twin in C alone; returns the first that it took, or the last."""
        assert self._target.bare is not None
        begin_s = time.monotonic()
        accepted: list[bytes] = []
        data = b""
        with self._target.bare() as bare:
            for data in inputs:
                self.bare += 1
                if self._last_input is not None:
                    self._last_input.note(data)
                if self._try_bare(bare, data):
                    accepted.append(data)
        self.bare_accepted += len(accepted)
        self._bare_s += time.monotonic() - begin_s
        self._look_at_clock()
        return accepted[0] if accepted else data

    def _try_bare(self, bare: Bare, data: bytes) -> bool:
        try:
            return bare(data)
        except _FAULTS as error:
            self.findings.add(data, error)
        except Exception:
            pass  # A refusal.
        return False

    def _look_at_clock(self) -> None:
        self._is_late = time.monotonic() - self._begin_s >= self._plan.seconds

    def report(self, engine: str, reached: int) -> Report:
        """Returns the result so far."""
        return Report(
            self._target.name,
            engine,
            self.frames,
            self.accepted,
            time.monotonic() - self._begin_s - self._bare_s,
            reached,
            len(self.findings.all),
            self.bare,
            self.bare_accepted,
            self._bare_s,
        )


Engine = Callable[[Target, Plan, LastInput | None], Report]


def starting_inputs(target: Target, plan: Plan) -> list[bytes]:
    """Returns the target's seeds and the inputs of the corpus."""
    inputs = target.seeds()
    if plan.corpus is not None and plan.corpus.is_dir():
        inputs += [path.read_bytes() for path in sorted(plan.corpus.iterdir()) if path.is_file()]
    return inputs
