"""The rows, sides and targets of the benchmark of maps over workers."""

from __future__ import annotations

from benchmarks.frame import (
    MICROSECONDS,
    MILLISECONDS,
    TORCH,
    WEFT,
    Form,
    Question,
    Row,
    Side,
    Target,
    Unit,
    at_most,
    times_faster,
)

MANNER = "WEFT_BENCHMARK_MANNER"
"""Environment variable that distinguishes Weft's sides."""

# The same maps on one worker; maps whose parts stay with the worker that they were dealt to; and,
# instead of a map, a call for each part with all its arguments.
ONE = Side("one worker", api="weft", environment={MANNER: "one worker"})
DEALT = Side("as dealt", api="weft", environment={MANNER: "as dealt"})
CALLS = Side("weft calls", api="weft", environment={MANNER: "weft calls"})
# The same meta-step in one process, with no calls.
LOCAL = Side("local", runner="alone")

PARTS = 16
EMPTY_PARTS = 100
PARTS_PER_S = Unit("parts/s", is_rate=True)
KILOBYTES = Unit("kB", 1e-3)

TWICE = Target("limit", 1.9, "median", "at least 1.9x one worker")

WITH = (("alone", ""), ("model", ", with a network of 40-40 units"))

ROWS = (
    *(
        Row(
            name,
            f"{PARTS} parts of 50 ms, {name}, 2 workers",
            operations=PARTS,
            unit=PARTS_PER_S,
            warm_up=1,
            limit=ONE.name,
            targets=(TWICE,),
            is_short=True,
            torch="",
        )
        for name in ("sleeping", "computing")
    ),
    *(
        Row(
            f"overhead {which}",
            f"{PARTS} parts of 50 ms{title}: longer than necessary, each",
            unit=MICROSECONDS,
            warm_up=0,
            torch="",
            limit="",
            targets=(at_most(1e-3, "1 ms"),),
            is_short=True,
        )
        for which, title in WITH
    ),
    *(
        Row(
            f"gap {which}",
            f"between parts of 50 ms on a worker{title}",
            unit=MICROSECONDS,
            warm_up=0,
            torch="",
            limit=CALLS.name,
        )
        for which, title in WITH
    ),
    Row(
        "empty",
        f"{EMPTY_PARTS} empty parts, 2 workers, each",
        operations=10 * EMPTY_PARTS,
        warm_up=EMPTY_PARTS,
        limit=CALLS.name,
        targets=(at_most(1e-3, "1 ms"),),
        is_short=True,
    ),
    Row(
        "empty watched",
        f"{EMPTY_PARTS} empty parts, with a progress display, each",
        operations=10 * EMPTY_PARTS,
        warm_up=EMPTY_PARTS,
        limit="",
        targets=(at_most(1e-3, "1 ms"),),
        torch="",
    ),
    Row("single", "a map of one empty part", limit=CALLS.name, operations=100),
    Row("pair", "a map of two empty parts, 2 workers", limit=CALLS.name, operations=100),
    *(
        Row(
            name,
            f"24 parts of 5 to 200 ms, {title}, balanced",
            unit=MILLISECONDS,
            operations=1,
            warm_up=0,
            torch="",
            limit=DEALT.name,
        )
        for name, title in (("random", "at random"), ("uneven", "the long ones for one worker"))
    ),
    Row(
        "step",
        "meta-step, 25 tasks, network of 40-40 units",
        unit=MILLISECONDS,
        operations=10,
        warm_up=3,
        limit=LOCAL.name,
        targets=(times_faster(1),),
        is_short=True,
        check="step gradients",
    ),
    Row(
        "step by calls",
        "the same, to a call for each task",
        work="step",
        unit=MILLISECONDS,
        operations=10,
        warm_up=3,
        torch=CALLS.name,
        limit="",
    ),
    Row(
        "large step",
        "meta-step, 25 tasks, 8 MB of parameters",
        unit=MILLISECONDS,
        operations=1,
        warm_up=1,
        limit=LOCAL.name,
        check="large step gradients",
    ),
    Row(
        "large step by calls",
        "the same, to a call for each task",
        work="large step",
        unit=MILLISECONDS,
        operations=1,
        warm_up=1,
        torch=CALLS.name,
        limit="",
    ),
    *(
        Row(
            f"{name} bytes",
            f"{title}: sent and received by the caller",
            unit=KILOBYTES,
            operations=1,
            warm_up=0,
            torch=CALLS.name,
            limit="",
        )
        for name, title in (("step", "40-40 units"), ("large step", "8 MB"))
    ),
)

QUESTION = Question(
    "benchmarks.mapreduce",
    "Maps over workers",
    ROWS,
    sides=(TORCH, WEFT, ONE, DEALT, CALLS, LOCAL),
    size=3,
    about=(
        "worker0 runs the maps, worker1 and worker2 the parts. Rows to a call for each task and "
        "of bytes have Weft's own calls in the column for torch."
    ),
    full=Form(rounds=8),
    short=Form(rounds=3, scale=0.5, placements=("a core each",)),
)
