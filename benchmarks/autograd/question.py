"""The rows, sides and targets of the benchmark of distributed autograd."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.autograd.shapes import SHAPES
from benchmarks.frame import TORCH, WEFT, Form, Question, Row, Side, times_faster

# The same graph in one process, with torch's local engine: work that every distributed pass needs.
LOCAL = Side("local", runner="alone")

PASSES = {
    "step": "forward and backward",
    "backward": "backward",
    "fast": "backward, FAST",
}
# In groups of 2 only, since starting processes takes more time than measuring.
SHORT = {
    "step 1 hop",
    "backward 1 hop",
    "fast 1 hop",
    "backward 4 calls to 1",
    "backward 1000 nodes",
}


def _rows() -> Iterator[Row]:
    for name, shape in SHAPES.items():
        for form, title in PASSES.items():
            row = f"{form} {name}"
            yield Row(
                row,
                f"{title}: {shape.title}",
                operations=100,
                limit="local",
                targets=(times_faster(5),) if row == "backward 1 hop" else (),
                is_short=row in SHORT,
                size=shape.size,
            )


QUESTION = Question(
    "benchmarks.autograd",
    "Distributed autograd",
    tuple(_rows()),
    sides=(TORCH, WEFT, LOCAL),
    about=(
        "Tensors of 2 elements; each call multiplies by a parameter of its worker. CPU: of all "
        "processes, a pass."
    ),
    full=Form(rounds=6),
    short=Form(rounds=4, placements=("a core each",)),
)
