"""Draws the measured timelines of all schedules as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import Trial

from torchweft.pipeline.schedules import Kind, Timeline
from torchweft.pipeline.schedules.table import KIND_NAMES

COLORS = {
    Kind.FORWARD: "#6d9fdc",
    Kind.BACKWARD: "#e3a35c",
    Kind.BACKWARD_INPUT: "#df7f93",
    Kind.BACKWARD_WEIGHT: "#74bf8a",
    Kind.UPDATE: "#5b4a8a",
}


def draw_timelines(trials: Sequence[Trial], path: Path) -> None:
    """Draws one step of each schedule, all on one axis of time.

    Of an asynchronous one, whose run has no steps, as much as fits into the longest step.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a window, so no display is needed
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    height = 0.9 + sum(0.6 + 0.22 * len(each.recording.timeline.spans) for each in trials)
    figure, axes = pyplot.subplots(
        len(trials), 1, figsize=(11, height), sharex=True, squeeze=False, layout="constrained"
    )
    for place, trial in zip(axes[:, 0], trials, strict=True):
        _draw(place, trial)
    timelines = [each.recording.timeline for each in trials]
    steps_s = [each.makespan_s for each in timelines if not each.table.is_asynchronous]
    longest_s = max(steps_s, default=timelines[0].makespan_s)
    axes[-1, 0].set(xlabel="milliseconds", xlim=(0, 1000 * longest_s))
    for place in axes[:-1, 0]:
        place.spines["bottom"].set_visible(False)
        place.tick_params(axis="x", length=0)
    kinds = {
        span.action.kind for each in trials for row in each.recording.timeline.spans for span in row
    }
    patches = [
        Patch(color=COLORS[kind], label=KIND_NAMES[kind]) for kind in COLORS if kind in kinds
    ]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Any, trial: Trial) -> None:
    timeline = trial.recording.timeline
    for worker, row in enumerate(timeline.spans):
        for kind, color in COLORS.items():
            bars = [
                (1000 * start_s, 1000 * (end_s - start_s))
                for action, start_s, end_s in row
                if action.kind is kind
            ]
            axes.broken_barh(
                bars, (worker - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.4
            )
    axes.set_yticks(range(len(timeline.spans)), [f"worker {n}" for n in range(len(timeline.spans))])
    axes.set_ylim(len(timeline.spans) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(trial.schedule, timeline), loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _title(name: str, timeline: Timeline) -> str:
    stages = timeline.table.n_stages
    batches = "minibatches without a break" if timeline.table.is_asynchronous else "micro-batches"
    return (
        f"{name}: {stages} stage{'s' if stages > 1 else ''}, {timeline.table.n_microbatches} "
        f"{batches}, {100 * timeline.idle_share:.0f} % idle"
    )
