"""The rows, sides and targets of the benchmark of reinforcement learning."""

from __future__ import annotations

from benchmarks.frame import TORCH, WEFT, Form, Question, Row, at_most, times_faster

QUESTION = Question(
    "benchmarks.reinforcement",
    "Reinforcement learning",
    (
        Row(
            "unbatched",
            "3 observers with an environment each, a forward pass for each step",
            operations=1500,
            targets=(times_faster(3),),
            is_short=True,
            warm_up=300,
            limit="",
        ),
        Row(
            "batched",
            "the same, a forward pass for the 3 observers: the tutorial's pattern",
            operations=1500,
            targets=(times_faster(3),),
            is_short=True,
            warm_up=300,
            limit="",
        ),
        Row(
            "16 environments",
            "the same, 16 environments an observer",
            operations=24_000,
            targets=(times_faster(1.5),),
            is_short=True,
            warm_up=4800,
            limit="",
        ),
        Row(
            "native vectors",
            "3 observers of torchweft.rl, a native vector of 64 environments each",
            operations=96_000,
            torch="",
            targets=(at_most(1 / 100_000, "10 us: 100,000 environment steps/s"),),
            is_short=True,
            warm_up=19_200,
            limit="",
        ),
        Row(
            "two halves",
            "the same with halves=2: one half of the environments steps while the agent decides",
            operations=96_000,
            torch="",
            warm_up=19_200,
            limit="",
        ),
    ),
    sides=(TORCH, WEFT),
    size=4,
    about="The first worker has the agent; the others run environments: CartPole of gymnasium.",
    full=Form(rounds=8, placements=("not pinned",)),
    short=Form(rounds=4, placements=("not pinned",)),
)
