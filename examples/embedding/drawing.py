"""Draws the loss, the bytes that each part of the model sends, and the staleness of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SMOOTHED_STEPS = 20
COLORS = {"pulled": "#6d9fdc", "pushed": "#e3a35c", "all-reduce": "#74bf8a"}
_HEIGHT = 0.38


def draw_picture(
    losses: Sequence[float],
    levels: Mapping[str, float],
    step_bytes: Mapping[str, Mapping[str, float]],
    copies_bytes: Mapping[str, float],
    staleness: Sequence[Mapping[str, Mapping[int, int]]],
    path: Path,
) -> None:
    """Draws a picture.

    Args:
        losses: The loss of each step.
        levels: Losses to compare with, by name.
        step_bytes: By part of the model, the bytes of a step by kind, a key of ``COLORS``.
        copies_bytes: By table, the bytes of a step if each trainer had a copy.
        staleness: By trainer and table, how often each staleness was observed.
        path: The picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a window, so no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    _draw_losses(axes[0], losses, levels)
    _draw_bytes(axes[1], step_bytes, copies_bytes)
    _draw_staleness(axes[2], staleness)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_losses(axes: Any, losses: Sequence[float], levels: Mapping[str, float]) -> None:
    axes.plot(losses, color="#c5d5ea", linewidth=0.8)
    width = min(SMOOTHED_STEPS, len(losses))
    means = [sum(losses[k - width : k]) / width for k in range(width, len(losses) + 1)]
    axes.plot(range(width - 1, len(losses)), means, color="#2f62a8", label="training")
    for number, (name, level) in enumerate(levels.items(), start=1):
        axes.axhline(level, color=f"C{number}", linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="log loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bytes(
    axes: Any, step_bytes: Mapping[str, Mapping[str, float]], copies_bytes: Mapping[str, float]
) -> None:
    parts = list(step_bytes)
    for number, (kind, color) in enumerate(COLORS.items()):
        sizes = [step_bytes[part].get(kind, 0) for part in parts]
        places = [place + _HEIGHT * (number % 2 - 0.5) for place in range(len(parts))]
        axes.barh(places, sizes, _HEIGHT, color=color, label=kind)
    marks = [
        (copies_bytes[part], place) for place, part in enumerate(parts) if part in copies_bytes
    ]
    axes.plot(*zip(*marks, strict=True), "k|", markersize=22, label="if each trainer had a copy")
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set(xlabel="bytes of a step, all trainers", xscale="log")
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, markerscale=0.5
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_staleness(axes: Any, by_trainer: Sequence[Mapping[str, Mapping[int, int]]]) -> None:
    """Draws a histogram for each trainer and table, side by side."""
    named = [
        (f"{table}, trainer {number}", counts)
        for number, tables in enumerate(by_trainer)
        for table, counts in tables.items()
    ]
    width = 0.8 / max(1, len(named))
    for place, (name, counts) in enumerate(named):
        total = sum(counts.values())
        places = [int(value) + width * (place + 0.5) - 0.4 for value in counts]
        shares = [count / total for count in counts.values()]
        axes.bar(places, shares, width, color=f"C{place}", label=name)
    axes.set(xlabel="staleness of rows", ylabel="share of lookups")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
