"""The rows, sides and targets of the benchmark of reinforcement learning."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from benchmarks.frame import (
    COMPAT,
    TORCH,
    Form,
    Question,
    Row,
    Side,
    Target,
    at_most,
    times_faster,
)

LOCAL = Side("local", runner="alone")

EPISODE = 300
"""Steps of 3 observers with an environment each, in an episode."""

# By name: title, environments of an observer, target.
PROGRAMS: dict[str, tuple[str, int, Target | None]] = {
    "unbatched": ("the tutorial's program, a forward pass for each step", 1, times_faster(3)),
    "batched": ("the same, a forward pass for the 3 observers", 1, times_faster(3)),
    "16 environments": ("the same, 16 environments an observer", 16, times_faster(1.5)),
    "batched by Weft": ("batched by Weft's decorator, beside the tutorial's pattern", 1, None),
    "16 environments by Weft": ("the same, 16 environments an observer", 16, None),
}


def _rows() -> Iterator[Row]:
    for name, (title, count, target) in PROGRAMS.items():
        yield Row(
            name,
            title,
            operations=(4 if count == 1 else 2) * EPISODE * count,
            ours=COMPAT.name,
            targets=() if target is None else (target,),
            is_short=target is not None,
            warm_up=EPISODE * count,
            limit="" if name.endswith("by Weft") else LOCAL.name,
        )
    for name, title, is_short in (
        (
            "native vectors",
            "3 observers of torchweft.rl, a native vector of 64 environments each",
            True,
        ),
        ("two halves", "the same with halves=2: one half steps while the agent decides", False),
    ):
        yield Row(
            name,
            title,
            operations=96_000,
            ours=COMPAT.name,
            torch="",
            targets=(at_most(1 / 100_000, "10 us: 100,000 environment steps/s"),)
            if is_short
            else (),
            is_short=is_short,
            warm_up=19_200,
            limit="",
        )


QUESTION = Question(
    "benchmarks.reinforcement",
    "Reinforcement learning",
    tuple(_rows()),
    sides=(TORCH, COMPAT, LOCAL),
    size=4,
    about="The first worker has the agent; the others run environments: CartPole of gymnasium.",
    full=Form(rounds=8, placements=("not pinned",)),
    short=Form(rounds=4, placements=("not pinned",)),
    is_possible=lambda: importlib.util.find_spec("gymnasium") is not None,
)
