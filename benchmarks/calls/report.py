"""Turns rounds into one table in Markdown, with the ratios that the targets are about."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.calls.side import Round

Rounds = Mapping[tuple[str, str], Sequence[Round]]
"""The rounds of each (side, work)."""

TITLES = {
    "function": "rpc_sync, Python function",
    "operator": "rpc_sync, torch.add",
    "reference": "remote().to_here()",
    "in flight 1": "rpc_async, 1 in flight",
    "in flight 100": "rpc_async, 100 in flight",
    "in flight 2000": "rpc_async, 2000 in flight",
}

# Times faster than torch RPC that are aimed for; the other rows are for information.
TARGET_SPEEDUP = {"function": 6.0, "in flight 2000": 6.0}
TARGET_CPU_RATIO = 4.0
TARGET_OF_RAW = 5.0


@dataclass(frozen=True)
class Figures:
    """What is said about one side and work, over all rounds.

    Attributes:
        median_us: Of a call; where calls overlap, the time a call takes off the whole.
        p99_us: Of a call; meaningless where calls overlap.
        cpu_us: CPU time of both processes for a call.
    """

    median_us: float
    p99_us: float
    cpu_us: float


def figures_of(rounds: Sequence[Round]) -> Figures:
    """Sums up the rounds of one side and work."""
    seconds = sorted(second for one in rounds for second in one.seconds)
    cpu_s = statistics.median(one.cpu_s for one in rounds)
    return Figures(
        median_us=statistics.median(seconds) * 1e6,
        p99_us=seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e6,
        cpu_us=cpu_s * 1e6,
    )


def speedups(slower: Sequence[Round], faster: Sequence[Round]) -> list[float]:
    """Returns for each round how many times faster one side's median call was, in order."""
    return sorted(
        statistics.median(one.seconds) / statistics.median(other.seconds)
        for one, other in zip(slower, faster, strict=True)
    )


def table(rounds: Rounds) -> list[str]:
    """Returns the lines of a table: one row for each side and work."""
    lines = [
        "| work | side | median | p99 | calls/s | CPU a call | times faster (worst-best round) |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for work, title in TITLES.items():
        for side in ("torch", "weft", "raw"):
            if (side, work) in rounds:
                lines.append(_row(rounds, work, title, side))
    return lines


def _row(rounds: Rounds, work: str, title: str, side: str) -> str:
    figures = figures_of(rounds[side, work])
    overlaps = work.startswith("in flight") and work != "in flight 1"
    p99 = "" if overlaps else f"{figures.p99_us:.0f} us"
    ratio = ""
    if side == "weft" and ("torch", work) in rounds:
        each = speedups(rounds["torch", work], rounds["weft", work])
        ratio = f"{statistics.median(each):.1f} ({each[0]:.1f}-{each[-1]:.1f})"
    return (
        f"| {title} | {side} | {figures.median_us:.1f} us | {p99} | {1e6 / figures.median_us:,.0f} "
        f"| {figures.cpu_us:.1f} us | {ratio} |"
    )


def verdicts(rounds: Rounds) -> list[str]:
    """Returns a line for each target that the rounds say something about."""
    lines = []
    for work in TARGET_SPEEDUP:
        if ("torch", work) in rounds and ("weft", work) in rounds:
            lines.append(_speed_verdict(rounds, work))
    if ("torch", "function") in rounds and ("weft", "function") in rounds:
        ratio = _cpu_us(rounds, "torch") / _cpu_us(rounds, "weft")
        lines.append(
            f"{_mark(ratio >= TARGET_CPU_RATIO)} CPU of a call: {ratio:.1f} times less than torch "
            f"(target {TARGET_CPU_RATIO:.0f})"
        )
    if ("raw", "function") in rounds and ("weft", "function") in rounds:
        ratio = 1 / statistics.median(
            speedups(rounds["raw", "function"], rounds["weft", "function"])
        )
        lines.append(
            f"{_mark(ratio <= TARGET_OF_RAW)} {TITLES['function']}: {ratio:.1f} times the raw "
            f"ping-pong (target at most {TARGET_OF_RAW:.0f})"
        )
    return lines


def _speed_verdict(rounds: Rounds, work: str) -> str:
    ratio = statistics.median(speedups(rounds["torch", work], rounds["weft", work]))
    target = TARGET_SPEEDUP[work]
    return (
        f"{_mark(ratio >= target)} {TITLES[work]}: {ratio:.1f} times faster than torch "
        f"(target {target:.0f})"
    )


def _cpu_us(rounds: Rounds, side: str) -> float:
    return figures_of(rounds[side, "function"]).cpu_us


def _mark(is_met: bool) -> str:
    return "- met:" if is_met else "- missed:"
