"""The rows, sides and targets of the benchmark of torchrl's replay buffer."""

from __future__ import annotations

import importlib.util

from benchmarks.frame import COMPAT, MILLISECONDS, TORCH, Form, Question, Row, times_faster

BATCH, SAMPLES = 256, 10

QUESTION = Question(
    "benchmarks.replay",
    "torchrl's replay buffer on another worker",
    (
        Row(
            "extend and sample",
            f"extend by {BATCH} frames, and {SAMPLES} samples of as many",
            operations=20,
            unit=MILLISECONDS,
            ours=COMPAT.name,
            targets=(times_faster(2),),
            is_short=True,
            warm_up=5,
            limit="",
        ),
        Row(
            "extend",
            f"extend by {BATCH} frames",
            operations=100,
            unit=MILLISECONDS,
            ours=COMPAT.name,
            warm_up=10,
            limit="",
        ),
        Row(
            "sample",
            f"a sample of {BATCH} frames",
            operations=100,
            unit=MILLISECONDS,
            ours=COMPAT.name,
            warm_up=10,
            limit="",
        ),
    ),
    sides=(TORCH, COMPAT),
    about="The second worker has the buffer; frames are those of CartPole.",
    full=Form(rounds=10),
    short=Form(rounds=5, scale=0.5, placements=("a core each",)),
    is_possible=lambda: importlib.util.find_spec("torchrl") is not None,
)
