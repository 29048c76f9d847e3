"""Time of a call against the size of its tensor, from 8 bytes to 1 GiB; see the README."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from benchmarks.frame import Form, Question, Row
from benchmarks.frame.figures import Rounds, figures_of
from benchmarks.frame.group import ROOT
from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, measured_placements, parse_options, save
from benchmarks.frame.units import number
from benchmarks.tensors.links import SIDES, measure_over_links
from benchmarks.tensors.payloads import KIB, MIB, POWERS
from benchmarks.tensors.question import LEAST_OPERATIONS, ONE_HOST, ROUND_BYTES, TCP, Link

LINKS = (ONE_HOST, TCP)
MOST_STEP = 2.0
"""How many times as long a call may take for twice the size."""
MOST_OPERATIONS = 500


def _rows(link: Link) -> Iterator[Row]:
    for payload in POWERS:
        operations = max(min(MOST_OPERATIONS, ROUND_BYTES // payload.size_bytes), LEAST_OPERATIONS)
        yield Row(
            f"{link.title}: {payload.name}",
            f"{link.title}, {payload.name.removeprefix('one way ')}",
            operations=operations,
            work=payload.name,
            ours=link.ours,
            torch=link.torch,
            limit=link.limit,
            warm_up=min(20, operations),
        )


SIZES = Question(
    "benchmarks.tensors",
    "Time of a call against the size of its tensor",
    tuple(row for link in LINKS for row in _rows(link)),
    sides=SIDES,
    about="A call with one tensor, answered by nothing.",
    full=Form(rounds=5, placements=("a core each",)),
    measure=measure_over_links,
)

Curve = Mapping[int, float]
"""Median seconds by size in bytes."""


def curve_of(link: Link, side: str, rounds: Rounds) -> Curve:
    """Returns the times of one side over a link."""
    return {
        payload.size_bytes: figures_of(found).median
        for payload in POWERS
        if (found := rounds.get((side, f"{link.title}: {payload.name}")))
    }


def steps_of(curve: Curve) -> dict[int, float]:
    """Returns how many times as long each size takes as half of it."""
    return {
        size: curve[size] / curve[half]
        for half, size in pairwise(sorted(curve))
        if size == 2 * half
    }


def size_text(size_bytes: int) -> str:
    """Returns a size as in the names of rows."""
    return next(each for each in POWERS if each.size_bytes == size_bytes).name.removeprefix(
        "one way "
    )


def _table(link: Link, rounds: Rounds) -> list[str]:
    sides = [side for side in (link.ours, link.torch, link.limit) if curve_of(link, side, rounds)]
    curves = [curve_of(link, side, rounds) for side in sides]
    lines = [
        f"| {link.title} | {' | '.join(f'{side}, us' for side in sides)} | to torch |",
        f"|---|{'---:|' * len(sides)}---:|",
    ]
    for size in sorted(curves[0]):
        times = [curve.get(size) for curve in curves]
        shown = ["" if each is None else number(each * 1e6) for each in times]
        ours, torch = times[0], times[1] if len(times) > 1 else None
        ratio = f"{number(torch / ours)}x" if ours and torch else ""
        lines.append(f"| {size_text(size)} | {' | '.join(shown)} | {ratio} |")
    return lines


def _verdict(link: Link, rounds: Rounds) -> str:
    """Judges the largest step that the limit does not have as well, as where a cache ends."""
    steps = steps_of(curve_of(link, link.ours, rounds))
    limits = steps_of(curve_of(link, link.limit, rounds))
    own = {size: step for size, step in steps.items() if step > limits.get(size, 0.0)}
    if not own:
        return f"- met: {link.title}: no step is larger than the limit's"
    size, step = max(own.items(), key=lambda item: item[1])
    mark = "met" if step <= MOST_STEP else "missed"
    return (
        f"- {mark}: {link.title}: the largest step is {number(step)}x, from "
        f"{size_text(size // 2)} to {size_text(size)} (target: at most {number(MOST_STEP)}x, or no "
        "larger than the limit's)"
    )


def draw(path: str, rounds: Rounds) -> None:
    """Draws the curves of both links with matplotlib, which has to be installed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, panels = pyplot.subplots(1, len(LINKS), figsize=(10, 4.2), sharey=True)
    marks = [8, KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    for panel, link in zip(panels, LINKS, strict=True):
        for side, name in ((link.torch, "torch RPC"), (link.ours, "Weft"), (link.limit, "limit")):
            curve = curve_of(link, side, rounds)
            style = {"linestyle": "--", "color": "0.6"} if side == link.limit else {}
            panel.plot(list(curve), [each * 1e6 for each in curve.values()], label=name, **style)
        panel.set(xscale="log", yscale="log", title=link.title, xlabel="size of the tensor")
        panel.xaxis.set_major_locator(FixedLocator(marks))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(int(size))))
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylabel("time of a call, us")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables and the largest steps, and draws the curves on request."""
    end_on_sigterm()
    own = ArgumentParser(add_help=False)
    own.add_argument("--plot", metavar="FILE", help="draw the curves; needs matplotlib")
    chosen, further = own.parse_known_args(arguments)
    options = parse_options(SIZES, further)
    lines = [f"# {SIZES.title}", "", provenance(), f"{SIZES.about} {options.rounds} rounds."]
    for placement, rounds in measured_placements(SIZES, options):
        links = [link for link in LINKS if curve_of(link, link.ours, rounds)]
        for link in links:
            lines += ["", f"## {link.title}, {placement}", "", *_table(link, rounds)]
        lines += ["", *[_verdict(link, rounds) for link in links]]
        if chosen.plot:
            draw(chosen.plot, rounds)
    lines += ["", *(f"- failed: {failure}" for failure in options.failures)]
    report = "\n".join(lines).rstrip() + "\n"
    print(report)
    if options.save:
        save(report, ROOT / "benchmarks" / "tensors", options.save)
    return 1 if options.failures else 0


if __name__ == "__main__":
    sys.exit(main())
