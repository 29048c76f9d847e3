"""Reports a run: figures as JSON, the loss curve as a picture, a table on the screen."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from data import Corpus
from model import Traffic
from progress import readable_bytes, smoothed
from rich.console import Console
from rich.table import Table
from settings import Settings
from synchronous import StepReport

import torchweft as weft

FLOAT_BYTES = 4


@dataclass(frozen=True)
class HeldOutPoint:
    """The perplexity on held-out text after a number of steps."""

    step: int
    perplexity: float


@dataclass
class History:
    """The data behind a run's figures, collected step by step.

    Attributes:
        losses: Per step, every trainer's loss.
        held_out: Perplexity on held-out text, after every epoch.
        training_s: Seconds spent in steps.
        traffic: Per trainer, its traffic since the workers started.
        traffic_steps: Steps that ``traffic`` covers: this run's, without those before a resume.
    """

    losses: list[list[float]] = field(default_factory=list)
    held_out: list[HeldOutPoint] = field(default_factory=list)
    training_s: float = 0.0
    traffic: list[Traffic] = field(default_factory=list)
    traffic_steps: int = 0

    def add_step(self, report: StepReport) -> None:
        """Records one step."""
        self.losses.append(report.losses)
        self.training_s += report.seconds
        self.traffic = report.traffic
        self.traffic_steps += 1

    def add_held_out(self, perplexity: float) -> None:
        """Records a test on held-out text."""
        self.held_out.append(HeldOutPoint(len(self.losses), perplexity))

    def is_tested(self) -> bool:
        """Returns whether the model of the last step was tested on held-out text."""
        return bool(self.held_out) and self.held_out[-1].step == len(self.losses)

    def state(self) -> dict[str, Any]:
        """Returns the data that a resumed run needs to draw the whole curve."""
        return {
            "losses": self.losses,
            "held_out": [asdict(point) for point in self.held_out],
            "training_s": self.training_s,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Restores a history from the data that ``state`` returned."""
        points = [HeldOutPoint(**point) for point in state["held_out"]]
        return cls(state["losses"], points, state["training_s"])

    def bytes_per_step(self, purpose: str) -> float:
        """Returns the bytes that one trainer sends and receives in one step for a purpose."""
        moved = sum(traffic.by_purpose.get(purpose, 0) for traffic in self.traffic)
        return moved / max(1, self.traffic_steps * len(self.traffic))


def activation_bytes(batch: int, window: int, width: int) -> int:
    """Returns the bytes of ``width`` numbers per word and their gradients: 2·B·T·4·width."""
    return 2 * batch * window * FLOAT_BYTES * width


def lstm_bytes(embedding: int, hidden: int) -> int:
    """Returns the bytes of the LSTM's gradients, sent to the server and received as sums."""
    return 2 * FLOAT_BYTES * 4 * hidden * (embedding + hidden + 2)


def make_figures(
    settings: Settings, corpus: Corpus, history: History, wall_s: float
) -> dict[str, Any]:
    """Returns the run's figures, ready to be written as JSON."""
    trainers, steps = settings.trainers, len(history.losses)
    width = settings.embedding + settings.hidden
    batch, window, vocabulary = settings.batch, settings.window, len(corpus.words)
    return {
        "versions": {
            "weft": weft.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": asdict(settings),
        "text": {
            "source": corpus.source,
            "training_tokens": corpus.training.numel(),
            "held_out_tokens": corpus.held_out[1:].numel(),
            "vocabulary": vocabulary,
        },
        "result": {
            "held_out_perplexity": history.held_out[-1].perplexity,
            "unigram_perplexity": corpus.unigram_perplexity(),
            "steps": steps,
            "training_s": history.training_s,
            "wall_s": wall_s,
            "tokens_per_s": steps * trainers * batch * window / max(history.training_s, 1e-9),
        },
        "bytes_per_step_and_trainer": {
            "model_measured": history.bytes_per_step("model"),
            "model_loss_on_server": activation_bytes(batch, window, width),
            "model_logits_travel": activation_bytes(batch, window, width + vocabulary),
            "lstm_gradients_measured": history.bytes_per_step("lstm"),
            "lstm_gradients": lstm_bytes(settings.embedding, settings.hidden),
            "control_measured": history.bytes_per_step("control"),
        },
        "loss": history.losses,
        "held_out": [asdict(point) for point in history.held_out],
    }


def write_figures(figures: dict[str, Any], path: Path) -> None:
    """Writes the figures as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def print_table(console: Console, figures: dict[str, Any]) -> None:
    """Prints the results beside the figures to compare them with."""
    result, moved = figures["result"], figures["bytes_per_step_and_trainer"]
    logits_travel = figures["settings"]["logits_travel"]
    expected = moved["model_logits_travel" if logits_travel else "model_loss_on_server"]
    excess = moved["model_measured"] / expected - 1
    rows = [
        ("steps", f"{result['steps']:,} in {result['training_s']:.0f} s"),
        ("tokens per second", f"{result['tokens_per_s']:,.0f}"),
        ("perplexity, held-out text", f"{result['held_out_perplexity']:.1f}"),
        ("perplexity, unigram model", f"{result['unigram_perplexity']:.1f}"),
        None,
        ("activations and their gradients", readable_bytes(moved["model_measured"])),
        ("  2·B·T·4·(E+H), loss on the server", readable_bytes(moved["model_loss_on_server"])),
        ("  2·B·T·4·(E+H+V), logits travel", readable_bytes(moved["model_logits_travel"])),
        ("  measured against its formula", f"{excess:+.1%}"),
        ("gradients between LSTM copies", readable_bytes(moved["lstm_gradients_measured"])),
        ("all other messages", readable_bytes(moved["control_measured"])),
    ]
    table = Table("bytes are per step and trainer", "", title="language model")
    table.columns[1].justify = "right"
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    console.print(table)


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """Draws perplexity over steps: of each trainer, of held-out text and of the unigram model."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a window, so no display is needed
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    for trainer, losses in enumerate(zip(*figures["loss"], strict=True)):
        steps, color = range(1, len(losses) + 1), f"C{trainer}"
        axes.plot(steps, [math.exp(x) for x in losses], color=color, alpha=0.2, linewidth=0.7)
        smooth = [math.exp(loss) for loss in smooth_curve(losses)]
        axes.plot(steps, smooth, color=color, linewidth=1.8, label=f"trainer{trainer}, smoothed")
    steps_tested = [point["step"] for point in figures["held_out"]]
    perplexities = [point["perplexity"] for point in figures["held_out"]]
    last = (steps_tested[-1], perplexities[-1])
    axes.plot(steps_tested, perplexities, "o-", color="black", label="held-out text")
    axes.annotate(f"{last[1]:.0f}", last, xytext=(7, -3), textcoords="offset points")
    unigram = figures["result"]["unigram_perplexity"]
    axes.axhline(unigram, color="gray", linestyle="--", label=f"unigram model: {unigram:.0f}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"Language model on {Path(figures['text']['source']).name}")
    axes.set(xlabel="step", ylabel="perplexity (the loss's exponential)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def smooth_curve(losses: Sequence[float]) -> list[float]:
    """Returns the losses with the noise of single steps smoothed out."""
    smooth: list[float] = []
    for step, loss in enumerate(losses):
        smooth.append(smoothed(smooth[-1] if smooth else 0.0, loss, step))
    return smooth
