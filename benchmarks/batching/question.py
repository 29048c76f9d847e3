"""The rows, sides and targets of the benchmark of batched calls."""

from __future__ import annotations

from benchmarks.frame import TORCH, WEFT, Form, Question, Row, at_most, times_faster

QUESTION = Question(
    "benchmarks.batching",
    "Batched calls",
    (
        Row(
            "64 callers",
            "64 callers in step, a policy of two layers, batches of up to 64",
            operations=6400,
            targets=(times_faster(3),),
            is_short=True,
            warm_up=640,
            limit="",
        ),
        Row(
            "server",
            "the same: CPU time of the server, an answer",
            operations=6400,
            targets=(at_most(1 / 25_000, "40 us: 25,000 answers/s on one core"),),
            is_short=True,
            warm_up=640,
            limit="",
        ),
        Row(
            "full batches",
            "64 callers in step, each batch waits for all of them",
            operations=6400,
            targets=(times_faster(3),),
            is_short=True,
            warm_up=640,
            limit="",
        ),
        Row(
            "server, full",
            "the same: CPU time of the server, an answer",
            operations=6400,
            targets=(at_most(1 / 25_000, "40 us: 25,000 answers/s on one core"),),
            is_short=True,
            warm_up=640,
            limit="",
        ),
        Row(
            "by hand",
            "the same program on both sides: the tutorial's pattern, batches of 64",
            operations=6400,
            warm_up=640,
            limit="",
        ),
        Row(
            "64 streams",
            "the same; each caller makes its next call when it has an answer",
            operations=6400,
            torch="",
            warm_up=640,
            limit="",
        ),
        Row(
            "unbatched",
            "64 callers in step, a forward pass for each call",
            operations=3200,
            warm_up=640,
            limit="",
        ),
        Row(
            "lone caller",
            "one caller, one call at a time, batches of one",
            operations=300,
            targets=(times_faster(3),),
            is_short=True,
            limit="",
        ),
    ),
    sides=(TORCH, WEFT),
    size=8,
    about=(
        "The first worker serves; the workers of odd rank call, each with 16 calls in flight. CPU: "
        "of all processes, an answer."
    ),
    full=Form(rounds=8, placements=("a core each", "not pinned")),
    short=Form(rounds=4, placements=("a core each",)),
)
