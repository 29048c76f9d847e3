"""What the workers of the tests of spans and metrics run, and how these are collected."""

from __future__ import annotations

import contextlib
import math
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from torchweft import observe, rpc
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.current import current
from torchweft.rpc import functions
from torchweft.rpc.node import current_node

LIMIT_S = 20.0
WORKERS = ("driver", "worker0", "worker1")
CLIENT, SERVER, INTERNAL = (
    trace.SpanKind.CLIENT,
    trace.SpanKind.SERVER,
    trace.SpanKind.INTERNAL,
)


class Collected:
    """The spans of one worker."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("program")
        self.spans = observe.spans(provider)


COLLECTED: Slot[Collected] = Slot(Collected)


def count_calls() -> None:
    """Has this worker count its calls, as if it was observed."""
    current_node().reporter.counting.extend(3600.0)


def stop_counting() -> None:
    current_node().reporter.counting.tick(math.inf)


def here() -> Collected:
    return current().slots[COLLECTED]


class Seen(NamedTuple):
    """A span that has ended."""

    worker: str
    name: str
    kind: trace.SpanKind
    trace: int
    id: int
    parent: int
    attributes: dict[str, Any]
    is_error: bool
    links: list[int]


def seen(span: ReadableSpan) -> Seen:
    assert span.context is not None
    return Seen(
        current().info.name,
        span.name.removeprefix(f"{__name__}."),
        span.kind,
        span.context.trace_id,
        span.context.span_id,
        0 if span.parent is None else span.parent.span_id,
        dict(span.attributes or {}),
        span.status.status_code is trace.StatusCode.ERROR,
        [each.context.span_id for each in span.links],
    )


def start() -> None:
    here().spans.start()


def stop() -> list[Seen]:
    here().spans.stop()
    found = [seen(span) for span in here().exporter.get_finished_spans()]
    here().exporter.clear()
    return found


def stop_plainly() -> list[tuple[str, bool, int, int]]:
    """Does the same on a strict worker; of each span, its name, whether it is at a callee, ids."""
    return [(each.name, each.kind is SERVER, each.trace, each.parent) for each in stop()]


@contextlib.contextmanager
def spanned(*workers: str) -> Iterator[list[Seen]]:
    """Has workers make spans within the block; afterwards, yields them in the list."""
    found: list[Seen] = []
    for name in reversed(workers):
        rpc.rpc_sync(name, start)
    try:
        yield found
    finally:
        for name in workers:  # The driver first: its calls to the others make no spans then.
            found += rpc.rpc_sync(name, stop)
        found[:] = [each for each in found if each.name not in ("start", "stop")]


def is_plain() -> bool:
    """Whether nothing of spans is left in this worker."""
    worker = current_node().worker
    return not (worker.watchers or worker.engine.passes.watchers or worker.carrier)


# What workers run


def layer(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with here().tracer.start_as_current_span("inner"):
        return torch.tanh(hidden @ weight)


def first(hidden: torch.Tensor, weight: rpc.RRef[Any], other: rpc.RRef[Any]) -> torch.Tensor:
    return rpc.rpc_sync("worker1", second, args=(layer(hidden, weight.local_value()), other))


def through(worker: str, hidden: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rpc.rpc_sync(worker, torch.tanh, args=(hidden,)))


def second(hidden: torch.Tensor, weight: rpc.RRef[Any]) -> torch.Tensor:
    return layer(hidden, weight.local_value())


@functions.batched(largest=4, smallest=4, longest_wait=LIMIT_S)
def in_fours(values: torch.Tensor) -> torch.Tensor:
    with here().tracer.start_as_current_span("in a batch"):
        return values * 2


@functions.batched(smallest=1)
def alone(values: torch.Tensor) -> torch.Tensor:
    with here().tracer.start_as_current_span("in a batch of one"):
        return values * 2


@functions.batched(smallest=1)
def failing(values: torch.Tensor) -> torch.Tensor:
    raise ValueError("a secret of the program")


def four_here(value: torch.Tensor) -> torch.Tensor:
    return in_fours(value)


async def later(value: Any) -> Any:
    with here().tracer.start_as_current_span("in a coroutine"):
        return value


def fail() -> None:
    raise ValueError("a secret of the program")


def forever() -> None:
    while not rpc.is_cancelled():
        pass


def numbers(count: int) -> Iterator[int]:
    for number in range(count):
        with here().tracer.start_as_current_span("in a generator"):
            yield_now = number
        yield yield_now


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        with here().tracer.start_as_current_span("in a method"):
            return self.value


def slow_box() -> Box:
    rpc.rpc_sync("worker1", layer, args=(torch.ones(1, 1), torch.ones(1, 1)))
    return Box(7)


def baggage_here() -> object:
    return baggage.get_baggage("step")


def counted() -> dict[tuple[str, str], int]:
    return {
        (each.function, each.direction): each.calls
        for each in current_node().reporter.counting.counts()
    }


def values(url: str) -> dict[tuple[str, ...], float]:
    """Returns what an endpoint serves: values by name, worker, and the function or channel."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name,
            sample.labels["weft_worker"],
            sample.labels.get("rpc_method", sample.labels.get("weft_state", "")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
