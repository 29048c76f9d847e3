"""The rows, sides and targets of the benchmark of small calls."""

from __future__ import annotations

from benchmarks.frame import (
    RAW,
    TORCH,
    WEFT,
    Form,
    Question,
    Row,
    Side,
    at_most_times_limit,
    times_faster,
)

TENSORS = {"0": "no tensor", "1": "1 tensor", "16": "16 tensors"}
FORMS = {
    "sync": "rpc_sync",
    "async": "rpc_async().wait()",
    "remote": "remote().to_here()",
    "proxy": "rref.rpc_sync().echo",
}
SMALL_CALL_TARGETS = (times_faster(6), at_most_times_limit(5), times_faster(4, "cpu"))


def _latency(form: str, count: str) -> Row:
    is_main = (form, count) == ("sync", "1")
    return Row(
        f"{form} {count}",
        f"{FORMS[form]}, {TENSORS[count]}",
        operations=300 if form == "sync" else 200,
        targets=SMALL_CALL_TARGETS if is_main else (),
        is_short=is_main or (form, count) in {("remote", "1"), ("async", "1")},
    )


ROWS = (
    *(_latency(form, count) for form in FORMS for count in TENSORS),
    Row("operator", "rpc_sync, torch.add"),
    Row("flight 100", "rpc_async, 100 in flight", 1000),
    Row(
        "flight 2000",
        "rpc_async, 2,000 in flight",
        4000,
        targets=(times_faster(6),),
        is_short=True,
        warm_up=2000,
    ),
    Row("threads 8", "8 threads, 1 in flight each", 800),
    Row("threads 100", "8 threads, 100 in flight together", 1000),
    Row("threads 2000", "8 threads, 2,000 in flight together", 4000),
    Row(
        "busy python",
        "rpc_sync while the callee runs Python code",
        300,
        activity="python",
        work="paced",
        targets=(times_faster(2, "p99"),),
        is_short=True,
    ),
    Row(
        "busy kernels",
        "rpc_sync while the callee runs torch kernels",
        300,
        activity="kernels",
        work="paced",
    ),
)

SPINNING = Side("raw spinning", runner="raw", is_default=False)

# For `make bench-peers`: libraries whose actors can be called.
RAY = Side("ray", runner="alone", module="ray", is_default=False)
MONARCH = Side("monarch", runner="alone", module="monarch", is_default=False)

QUESTION = Question(
    "benchmarks.calls",
    "Small calls",
    ROWS,
    sides=(TORCH, WEFT, RAW, SPINNING, RAY, MONARCH),
    about="A call that does nothing, with tensors of 2 elements. CPU: of both processes, a call.",
    short=Form(rounds=4, scale=0.5, placements=("a core each", "not pinned")),
)
