"""The rows, sides and targets of the start-up benchmark."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.frame import SECONDS, TORCH, WEFT, Form, Question, Row, Side, no_more_cpu
from benchmarks.startup.measuring import measure_programs

COMPAT = Side("weft compat", api="torch")

FIGURES = {
    "first call": "from the start to the first answer",
    "first step": "from the start to the first optimizer step",
    "end": "from the start to the end, after that step",
}


def _rows() -> Iterator[Row]:
    for figure, title in FIGURES.items():
        for side in (WEFT, COMPAT):
            is_ours = side is WEFT
            yield Row(
                figure if is_ours else f"{figure}, {side.name}",
                title if is_ours else f"{title}, unchanged program",
                operations=1,
                unit=SECONDS,
                ours=side.name,
                work=figure,
                targets=(no_more_cpu(),) if figure != "first call" else (),
                is_short=is_ours,
            )


QUESTION = Question(
    "benchmarks.startup",
    "The start of short programs",
    tuple(_rows()),
    sides=(TORCH, WEFT, COMPAT),
    about="Two processes, each with an optimizer. CPU: of both together, from their start.",
    full=Form(rounds=10, placements=("not pinned",)),
    short=Form(rounds=2, placements=("not pinned",)),
    measure=measure_programs,
)
