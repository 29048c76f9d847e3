"""Draws the adaptation: a network's outputs for a held-out task after some inner steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from digits import SIDE, Digits
from learning import FIRST_TESTED, Comparison, History
from maml import Problem, Task, inner_step, make_tasks
from sinusoid import LEFT, RIGHT, Sinusoids
from torch import Tensor, nn
from torch.func import functional_call

SHOWN_STEPS = (0, 1, 10)
SHOWN_WAVE = FIRST_TESTED + 2
SHOWN_DIGITS = FIRST_TESTED + 4
TRAINED_COLOR, SCRATCH_COLOR = "C0", "C1"


def draw_picture(
    problem: Problem,
    model: nn.Module,
    untrained: nn.Module,
    history: History,
    comparison: Comparison,
    path: Path,
) -> None:
    """Draws one held-out task with and without meta-learning, and the scores of all tasks.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a window, so no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    scratch = replace(problem, inner_rate=comparison.scratch_rate)  # type: ignore[type-var]
    draw_task = _draw_wave if isinstance(problem, Sinusoids) else _draw_digits
    draw_task(axes[0, 0], model, problem)
    draw_task(axes[0, 1], untrained, scratch)
    axes[0, 0].set_title("meta-learned network, new task")
    axes[0, 1].set_title("the same network from scratch, same task")
    _draw_learning(axes[1, 0], problem, history)
    _draw_comparison(axes[1, 1], problem, comparison)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def outputs_after(
    model: nn.Module, problem: Problem, task: Task, x: Tensor, steps: tuple[int, ...]
) -> list[Tensor]:
    """Returns the outputs at ``x`` after each number of inner steps in ``steps``."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    outputs = []
    for step in range(max(steps) + 1):
        if step in steps:
            outputs.append(functional_call(model, parameters, x))
        parameters = inner_step(model, parameters, task, problem, first_order=True)
    return outputs


def _draw_wave(axes: Any, model: nn.Module, problem: Sinusoids) -> None:
    task = _task(model, problem, SHOWN_WAVE)
    x = torch.linspace(LEFT, RIGHT, 400, dtype=task.support_x.dtype).unsqueeze(1)
    axes.plot(x, problem.make_curve(SHOWN_WAVE, x), color="black", linewidth=1, label="the wave")
    outputs = outputs_after(model, problem, task, x, SHOWN_STEPS)
    styles = ((":", 0.5), ("--", 0.75), ("-", 1.0))
    for steps, output, (style, alpha) in zip(SHOWN_STEPS, outputs, styles, strict=True):
        label = f"after {_steps(steps)}" if steps else "before"
        axes.plot(x, output, style, color=TRAINED_COLOR, alpha=alpha, linewidth=2, label=label)
    axes.plot(task.support_x, task.support_y, "o", color="C3", label="ten samples")
    axes.set(xlabel="x", ylabel="y", ylim=(-6, 6))
    _tidy(axes, columns=2)


def _draw_digits(axes: Any, model: nn.Module, problem: Digits) -> None:
    """Draws the support images, and the query images: in a green frame if recognised."""
    task = _task(model, problem, SHOWN_DIGITS)
    steps = problem.inner_steps
    (output,) = outputs_after(model, problem, task, task.query_x, (steps,))
    is_right = (output.argmax(dim=-1) == task.query_y).tolist()
    per_class = len(task.query_y) // problem.ways
    for row in range(problem.ways):
        _draw_image(axes, task.support_x[row * problem.shots], 0, row, "black")
        for place in range(per_class):
            number = row * per_class + place
            frame = "C2" if is_right[number] else "C3"
            _draw_image(axes, task.query_x[number], place + 1.6, row, frame)
    axes.set(xlim=(-0.1, per_class + 1.7), ylim=(problem.ways + 0.1, -0.45), aspect="equal")
    axes.text(0.45, -0.12, "to adapt to", ha="center")
    right, middle = sum(is_right), 1.55 + per_class / 2
    text = f"to recognise: {right} of {len(is_right)} right after {_steps(steps)}"
    axes.text(middle, -0.12, text, ha="center")
    axes.axis("off")


def _draw_image(axes: Any, image: Tensor, left: float, top: float, frame: str) -> None:
    from matplotlib.patches import Rectangle

    size = 0.9
    extent = (left, left + size, top + size, top)
    axes.imshow(image.view(SIDE, SIDE), cmap="gray_r", extent=extent, vmin=0, vmax=1)
    axes.add_patch(Rectangle((left, top), size, size, fill=False, color=frame, linewidth=2))


def _draw_learning(axes: Any, problem: Problem, history: History) -> None:
    """Draws the scores of held-out tasks over meta-steps."""
    iterations = [test.iteration for test in history.tests]
    after = [test.after for test in history.tests]
    before = [test.before for test in history.tests]
    axes.plot(iterations, before, ":", color=TRAINED_COLOR, alpha=0.5, label="before", linewidth=2)
    label = f"after {_steps(problem.inner_steps)}"
    axes.plot(iterations, after, "o-", color=TRAINED_COLOR, markersize=4, label=label)
    _annotate(axes, iterations[-1], after[-1])
    axes.set(xlabel="meta-steps", ylabel=_score_label(problem), title="learning to adapt")
    axes.set_ylim(bottom=0, top=1 if problem.higher_is_better else None)
    _tidy(axes)


def _draw_comparison(axes: Any, problem: Problem, comparison: Comparison) -> None:
    """Draws the scores of held-out tasks over inner steps."""
    steps = range(len(comparison.trained))
    axes.plot(steps, comparison.trained, color=TRAINED_COLOR, linewidth=2, label="meta-learned")
    label = f"from scratch, rate {comparison.scratch_rate:g}\n(the best of several)"
    axes.plot(steps, comparison.scratch, color=SCRATCH_COLOR, linewidth=2, label=label)
    ends = sorted([comparison.trained[-1], comparison.scratch[-1]])
    _annotate(axes, steps[-1], ends[0], below=True)
    _annotate(axes, steps[-1], ends[1])
    axes.axvline(problem.inner_steps, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="inner steps", ylabel=_score_label(problem), title="adapting")
    axes.set_ylim(bottom=0, top=1 if problem.higher_is_better else None)
    _tidy(axes)


def _task(model: nn.Module, problem: Problem, seed: int) -> Task:
    return Task(*(tensor[0] for tensor in make_tasks(problem, torch.tensor([seed]), model)))


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _score_label(problem: Problem) -> str:
    return f"{problem.score_name}, held-out tasks"


def _annotate(axes: Any, x: float, y: float, *, below: bool = False) -> None:
    offset = (4, -12) if below else (4, 4)
    axes.annotate(f"{y:.2f}", (x, y), xytext=offset, textcoords="offset points")


def _tidy(axes: Any, columns: int = 1) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=columns)
