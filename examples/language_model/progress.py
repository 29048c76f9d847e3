"""Shows the progress of a run: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from model import Traffic
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from synchronous import StepReport

REFRESHES_PER_S = 5
LINE_EVERY_S = 5.0
SMOOTHING = 0.95
"""Weight of past steps in the displayed figures, which keeps them steady enough to read."""


class ProgressDisplay:
    """Shows loss, perplexity, tokens per second and traffic of every trainer; a context manager.

    Args:
        console: The console to draw on.
        trainers: Names of the trainers.
        steps: Numbers of the steps to run; a resumed run does not begin at 0.
        tokens_per_step: Words that one trainer reads in a step.
    """

    def __init__(
        self, console: Console, trainers: list[str], steps: range, tokens_per_step: int
    ) -> None:
        self._console = console
        self._trainers = trainers
        self._tokens_per_step = tokens_per_step
        self._losses: list[float] = []
        self._step_s = 0.0
        self._shown = 0
        self._traffic = [Traffic() for _ in trainers]
        self._line_due = time.monotonic() + LINE_EVERY_S
        self._bar = Progress(
            BarColumn(),
            TextColumn("step {task.completed:,} of {task.total:,}"),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", completed=steps.start, total=steps.stop)
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S
        )

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show_step(self, report: StepReport) -> None:
        """Updates the display after a step."""
        self._losses = [
            smoothed(old, new, self._shown)
            for old, new in zip(self._losses or report.losses, report.losses, strict=True)
        ]
        self._step_s = smoothed(self._step_s, report.seconds, self._shown)
        self._shown += 1
        self._traffic = report.traffic
        self._bar.advance(self._task)
        if not self._console.is_terminal and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            self._print_line()

    def show_epoch(self, epoch: int, perplexity: float) -> None:
        """Prints the perplexity on held-out text after an epoch."""
        self._console.print(
            f"after epoch {epoch:2d}: perplexity {perplexity:6.1f} on held-out text",
            highlight=False,
        )

    def _print_line(self) -> None:
        trainers = ", ".join(
            f"{name}: loss {loss:.2f}, perplexity {math.exp(loss):.0f}, {speed:,.0f} tokens/s, "
            f"sent {readable_bytes(traffic.sent)}, received {readable_bytes(traffic.received)}"
            for name, loss, speed, traffic in self._rows()
        )
        step = int(self._bar.tasks[0].completed)
        self._console.print(f"step {step:,}: {trainers}", highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table()
        table.add_column("trainer")
        for heading in ("loss", "perplexity", "tokens/s", "sent", "received"):
            table.add_column(heading, justify="right", min_width=10)
        for name, loss, speed, traffic in self._rows():
            table.add_row(
                name,
                f"{loss:.3f}",
                f"{math.exp(loss):,.1f}",
                f"{speed:,.0f}",
                readable_bytes(traffic.sent),
                readable_bytes(traffic.received),
            )
        return Group(table, self._bar)

    def _rows(self) -> list[tuple[str, float, float, Traffic]]:
        if not self._losses:
            return []
        speed = self._tokens_per_step / self._step_s
        return [
            (name, loss, speed, traffic)
            for name, loss, traffic in zip(self._trainers, self._losses, self._traffic, strict=True)
        ]


def smoothed(old: float, new: float, count: int) -> float:
    """Returns the moving average ``old`` of ``count`` values, updated with a new value.

    At first it is the plain mean, or the first values would weigh on many later averages.
    """
    weight = min(SMOOTHING, count / (count + 1))
    return weight * old + (1 - weight) * new


def readable_bytes(size_bytes: float) -> str:
    """Returns a number of bytes as text with a suitable unit, for instance ``1.50 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.2f} {unit}"
