"""The rows, sides and targets of the benchmark of training programs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.frame import (
    STEPS_PER_S,
    TORCH,
    WEFT,
    Form,
    Question,
    Row,
    Side,
    times_faster,
)

# The same program in one process, with no calls and torch's own autograd and optimizer.
LOCAL = Side("local", runner="alone")

# By name: title, workers, timed steps of a round.
PROGRAMS = {
    "rnn": ("RNN, embedding and decoder on a server", 2, 60),
    "server": ("parameter server, batched updates of 2 trainers", 3, 100),
    "agent": ("agent with 2 observers", 3, 100),
    "hybrid": ("2 trainers with DDP, embedding on a server", 4, 60),
    "hybrid by hand": ("2 trainers averaging by hand, embedding on a server", 4, 60),
}
WITH_TARGET = {"rnn", "server", "hybrid"}


def _rows() -> Iterator[Row]:
    for name, (title, size, steps) in PROGRAMS.items():
        yield Row(
            name,
            title,
            operations=steps,
            unit=STEPS_PER_S,
            targets=(times_faster(3),) if name in WITH_TARGET else (),
            is_short=name in WITH_TARGET or name == "hybrid by hand",
            size=size,
            warm_up=10,
            limit="local" if name == "rnn" else "",
            check=f"{name} losses",
        )


QUESTION = Question(
    "benchmarks.training",
    "Training programs",
    tuple(_rows()),
    sides=(TORCH, WEFT, LOCAL),
    about=(
        "Sizes are those of PyTorch's tutorials, so that calls take most of a step. Losses must be "
        "equal on both sides. CPU: of all processes, a step."
    ),
    full=Form(rounds=8),
    short=Form(rounds=3, scale=0.5, placements=("a core each",)),
)
