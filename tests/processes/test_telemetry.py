"""Spans of real workers are one trace for each step, and metrics are the workers' counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel', and its SDK")

import torch
from opentelemetry import baggage, trace
from opentelemetry import context as contexts

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options
from tests.processes import telemetry
from tests.processes.telemetry import (
    CLIENT,
    INTERNAL,
    LIMIT_S,
    SERVER,
    WORKERS,
    Seen,
    alone,
    baggage_here,
    fail,
    failing,
    first,
    forever,
    four_here,
    here,
    in_fours,
    is_plain,
    later,
    numbers,
    slow_box,
    spanned,
    through,
)
from torchweft import rpc
from torchweft.autograd import backward, context
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster, Nursery
from torchweft.optim import DistributedOptimizer

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
STREAMS = "torchweft.rpc.streams."


@pytest.fixture(scope="module")
def trio(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


def test_a_training_step_over_three_workers_is_one_trace(trio: Cluster) -> None:
    weights = [
        rpc.remote(name, torch.randn, args=(4, 4), kwargs={"requires_grad": True})
        for name in WORKERS[1:]
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.1)
    with spanned(*WORKERS) as spans:
        root_span = here().tracer.start_as_current_span("step")
        with root_span, context() as context_id:
            loss = rpc.rpc_sync("worker0", first, args=(torch.randn(2, 4), *weights)).sum()
            backward(context_id, [loss])
            optimizer.step(context_id)
    by_id = {each.id: each for each in spans}
    assert len(by_id) == len(spans)
    (root,) = [each for each in spans if not each.parent]
    assert (root.worker, root.name) == ("driver", "step")
    assert {each.trace for each in spans} == {root.trace}
    assert all(each.parent in by_id for each in spans if each is not root)

    def one(worker: str, name: str, kind: trace.SpanKind) -> Seen:
        (found,) = [each for each in spans if each[:3] == (worker, name, kind)]
        return found

    def parent(worker: str, name: str, kind: trace.SpanKind) -> Seen:
        return by_id[one(worker, name, kind).parent]

    # Forward: driver -> worker0 -> worker1.
    assert parent("driver", "first", CLIENT) is root
    assert parent("worker0", "first", SERVER) is one("driver", "first", CLIENT)
    assert parent("worker0", "inner", INTERNAL) is one("worker0", "first", SERVER)
    assert parent("worker0", "second", CLIENT) is one("worker0", "first", SERVER)
    assert parent("worker1", "second", SERVER) is one("worker0", "second", CLIENT)
    assert parent("worker1", "inner", INTERNAL) is one("worker1", "second", SERVER)
    # Backward: parts belong to the pass, on all workers.
    assert parent("driver", "backward", INTERNAL) is root
    for worker in WORKERS[1:]:
        part = one(worker, "backward TanhBackward0", INTERNAL)
        assert by_id[part.parent] is one("driver", "backward", INTERNAL)
        assert part.attributes["weft.autograd.context"] == context_id
        assert part.attributes["weft.autograd.operations"] == ("TanhBackward0", "MmBackward0")
    parts = [
        each for each in spans if each.worker == "driver" and each.name.startswith("backward ")
    ]
    assert parts
    assert {by_id[each.parent].name for each in parts} == {"backward"}
    # The optimizers.
    assert parent("driver", "step DistributedOptimizer", INTERNAL) is root
    for worker in WORKERS[1:]:
        served = parent(worker, "step SGD", INTERNAL)
        assert (served.worker, served.name, served.kind) == (
            worker,
            "torchweft.optim.local.step",
            SERVER,
        )
        made = by_id[served.parent]
        assert (made.worker, made.kind, made.parent) == ("driver", CLIENT, root.id)
        assert made.attributes["server.address"] == worker
    assert all(rpc.rpc_sync(name, is_plain) for name in WORKERS)


def test_each_way_of_calling_makes_two_spans(trio: Cluster) -> None:
    with spanned(*WORKERS) as spans, here().tracer.start_as_current_span("all"):
        assert rpc.rpc_async("worker0", later, args=(1,)).wait() == 1
        assert rpc.rpc_sync("driver", functions.identity, args=(2,)) == 2
        assert rpc.rpc_sync("worker0", lambda: 3) == 3
        large = torch.ones(1 << 18)
        assert rpc.rpc_sync("worker0", functions.identity, args=(large,)).equal(large)
        made = rpc.remote("worker0", slow_box)
        assert made.rpc_sync().get() == 7
        assert made.remote().get().to_here() == 7
        assert list(rpc.stream("worker0", numbers, args=(3,))) == [0, 1, 2]
    roots = {each.name for each in spans if not each.parent}
    assert roots == {"all"}
    assert len({each.trace for each in spans}) == 1
    by_id = {each.id: each for each in spans}
    # A stream asks for values ahead: one of the sides may lack the last calls.
    of_stream = [
        each
        for each in spans
        if each.name.startswith((STREAMS, "numbers")) or "the stream of" in each.name
    ]
    assert sum(each.kind is CLIENT for each in of_stream) >= 4
    assert all(
        by_id.get(each.parent, each) in of_stream for each in of_stream if each.kind is SERVER
    )
    others = [each for each in spans if each not in of_stream]
    served = [each for each in others if each.kind is SERVER]
    made_calls = [each for each in others if each.kind is CLIENT]
    assert sorted(each.parent for each in served) == sorted(each.id for each in made_calls)
    for each in served:
        assert each.attributes["weft.peer"] == by_id[each.parent].worker
        assert by_id[each.parent].attributes["weft.peer"] == each.worker
        assert each.attributes["rpc.system.name"] == "torchweft"
        assert 0.0 <= each.attributes["weft.queue.duration"] < LIMIT_S
    for name, caller in (
        ("in a coroutine", "later"),
        ("in a method", "Box.get"),
        ("in a generator", "numbers"),
    ):
        found = [each for each in spans if each.name == name]
        assert {by_id[each.parent].name for each in found} == {caller}
    nested = [each for each in made_calls if each.name == "layer"]
    assert [by_id[each.parent].name for each in nested] == ["slow_box"]
    of_method = [each.name for each in others if each.name.endswith((".get", "get of a reference"))]
    assert sorted(of_method) == ["Box.get"] * 2 + ["get of a reference"] * 2


def test_the_span_of_a_pass_reaches_workers_that_its_leader_does_not_call(trio: Cluster) -> None:
    """The driver sends gradients to worker0 alone, which hands the context on to worker1."""
    needs_grad = torch.ones(1, 4, requires_grad=True)
    with spanned(*WORKERS) as spans, context() as context_id:
        loss = rpc.rpc_sync("worker0", through, args=("worker1", needs_grad)).sum()
        for _ in range(2):
            backward(context_id, [loss], retain_graph=True)
    passes = [each.id for each in spans if each.name == "backward"]
    assert len(passes) == 2
    for worker in WORKERS[1:]:
        parts = [each for each in spans if each[:2] == (worker, "backward TanhBackward0")]
        assert sorted(each.parent for each in parts) == sorted(passes)


def test_a_batch_is_linked_to_the_spans_of_its_callers(trio: Cluster) -> None:
    one = torch.ones(2)
    with spanned(*WORKERS) as spans:
        futures = []
        for number in range(2):
            with here().tracer.start_as_current_span(f"caller {number}"):
                futures.append(rpc.rpc_async("worker0", in_fours, args=(one,)))
        # One call by another worker, and one by a thread of the callee itself.
        other = rpc.rpc_async("worker1", rpc.rpc_sync, args=("worker0", in_fours, (one,)))
        own = rpc.rpc_async("worker0", four_here, args=(one,))
        for future in (*futures, other, own):
            assert future.wait().equal(one * 2)
        assert rpc.rpc_sync("worker0", alone, args=(one,)).equal(one * 2)
        with pytest.raises(ValueError, match="a secret"):
            rpc.rpc_sync("worker0", failing, args=(one,))
    by_id = {each.id: each for each in spans}
    (batch,) = [each for each in spans if each.name.startswith("batch ") and len(each.links) > 1]
    assert (batch.worker, batch.kind, batch.parent) == ("worker0", INTERNAL, 0)
    assert batch.name == f"batch {telemetry.__name__}.in_fours"
    assert batch.attributes["weft.batch.calls"] == 4
    linked = [by_id[each] for each in batch.links]
    assert sorted((each.worker, each.name, each.kind) for each in linked) == sorted(
        [
            ("driver", "in_fours", CLIENT),
            ("driver", "in_fours", CLIENT),
            ("worker1", "in_fours", CLIENT),
            ("worker0", "four_here", SERVER),
        ]
    )
    callers = {by_id[each.parent].name for each in linked if each.worker == "driver"}
    assert callers == {"caller 0", "caller 1"}
    (inner,) = [each for each in spans if each.name == "in a batch"]
    assert by_id[inner.parent] is batch
    # A batch of one is in the trace of its call.
    (inner,) = [each for each in spans if each.name == "in a batch of one"]
    single = by_id[inner.parent]
    assert (by_id[single.parent].name, by_id[single.parent].kind) == ("alone", SERVER)
    assert [by_id[each].kind for each in single.links] == [CLIENT]
    (failed,) = [each for each in spans if each.name.endswith(".failing") and not each.kind.value]
    assert failed.attributes["error.type"] == "ValueError"
    assert all(rpc.rpc_sync(name, is_plain) for name in WORKERS)


def test_an_error_is_told_by_its_type_and_not_by_its_text(trio: Cluster) -> None:
    with spanned(*WORKERS) as spans:
        with pytest.raises(ValueError, match="a secret"):
            rpc.rpc_sync("worker0", fail)
        with pytest.raises(ValueError, match="a secret"):
            rpc.rpc_async("worker0", fail).wait()
        with pytest.raises(CallTimeout):
            rpc.rpc_sync("worker0", forever, timeout=0.2)
        rpc.rpc_sync("worker0", functions.identity, args=(1,))
    failed = [each for each in spans if each.name == "fail"]
    assert Counter(each.kind for each in failed) == {CLIENT: 2, SERVER: 2}
    for each in failed:
        assert each.is_error
        assert each.attributes["error.type"] == "ValueError"
    (late,) = [each for each in spans if each.name == "forever" and each.kind is CLIENT]
    assert late.attributes["error.type"] == "torchweft.errors.CallTimeout"
    assert not any(each.is_error for each in spans if each.name.endswith("identity"))
    assert not any("secret" in str(each) for each in spans)


def test_baggage_of_the_program_is_carried(trio: Cluster) -> None:
    token = contexts.attach(baggage.set_baggage("step", "17"))
    try:
        assert rpc.rpc_sync("worker0", baggage_here) is None
        with spanned("driver", "worker0"):
            assert rpc.rpc_sync("worker0", baggage_here) == "17"
    finally:
        contexts.detach(token)
