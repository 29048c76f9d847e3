"""Draws the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SMOOTHED = 20
SOLVED = 195


def draw_picture(episodes: Sequence[tuple[int, str, float]], algorithm: str, path: Path) -> None:
    """Draws the return of each episode, by observer, and the mean of the last 20.

    Args:
        episodes: Environment steps before the end of each episode, its observer, its return.
        algorithm: Its name, for the title.
        path: The picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a window, so no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, name in enumerate(sorted({name for _, name, _ in episodes})):
        own = [(step, reward) for step, each, reward in episodes if each == name]
        axes.plot(*zip(*own, strict=True), ".", markersize=3, color=f"C{number}", label=name)
    rewards = [reward for _, _, reward in episodes]
    means = [sum(rewards[k - SMOOTHED : k]) / SMOOTHED for k in range(SMOOTHED, len(rewards) + 1)]
    steps = [step for step, _, _ in episodes][SMOOTHED - 1 :]
    axes.plot(steps, means, color="black", label=f"mean of the last {SMOOTHED}")
    axes.axhline(SOLVED, color="gray", linestyle="--", linewidth=1, label=f"solved: {SOLVED}")
    axes.set(xlabel="environment steps", ylabel="return", title=algorithm)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
