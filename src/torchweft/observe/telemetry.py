"""Tells OpenTelemetry of each call, part of a backward pass and step of an optimizer, as spans.

``Spans`` switches that on and off in one worker, and ``Tracer`` makes the spans. No other file
imports OpenTelemetry: its API, for which the program brings an SDK and an exporter. Names of
attributes are those of the semantic conventions for RPC.

Messages carry contexts of spans as text, made and read by the propagator of the process:
``traceparent`` and ``baggage`` of the W3C unless the program has set another.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchweft.autograd import current_context_id
from torchweft.errors import AutogradError, ObserveError
from torchweft.extending import (
    IncomingCall,
    OutgoingCall,
    PerWorker,
    Watcher,
    on_leave,
    served_call,
    this_worker,
    watch,
)
from torchweft.ids import ReferenceId, worker_of
from torchweft.version import VERSION

K = TypeVar("K")
V = TypeVar("V")

MOST_CONTEXTS = 1000
"""Contexts of each kind that a worker keeps."""


def carried_in(context: Context) -> bytes:
    """Returns a context as a call carries it; nothing where it has none."""
    headers: dict[str, str] = {}
    propagate.inject(headers, context)
    return "\n".join([f"{name}:{value}" for name, value in headers.items()]).encode()


def context_in(carried: bytes) -> Context:
    """Returns the context that a message carries."""
    lines = carried.decode(errors="replace").split("\n")
    headers = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return propagate.extract(headers, Context())


class _Pass:
    """The span of a backward pass, as this worker knows it.

    Args:
        carried: Its context, as messages carry it.
    """

    def __init__(self, carried: bytes) -> None:
        self.carried = carried
        self.told: set[int] = set()
        """The workers to which this one has sent the context."""

    @functools.cached_property
    def context(self) -> Context:
        """Its context."""
        return context_in(self.carried)


SYSTEM = "torchweft"
_NS = 1_000_000_000


class Tracer(Watcher):
    """Makes the spans of the calls and passes of one worker. Thread-safe.

    Args:
        provider: Makes the tracer; None for the provider of the process.

    Attributes:
        me: The id of the worker.
    """

    carries_contexts = True

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer(SYSTEM, VERSION, tracer_provider=provider)
        self._steps = _Steps()
        self._of_context: OrderedDict[int, Context] = OrderedDict()
        """The calls that have begun autograd contexts here, for their backward passes."""
        self._passes: OrderedDict[tuple[int, int], _Pass] = OrderedDict()
        """The newest passes, by the numbers of a pass and of its autograd context."""
        self._lock = threading.Lock()
        self.me = -1

    # Calls at their caller

    def call_begins(self, call: OutgoingCall) -> bytes:
        """Begins the span of a call; returns its context."""
        name = self.names.name_of(call.function)
        attributes = {**_about(name, call.worker_name), "server.address": call.worker_name}
        with contextlib.suppress(AutogradError):
            attributes["weft.autograd.context"] = current_context_id()
        within = _current(self._context_of(call.parent))
        span = self._tracer.start_span(name, within, SpanKind.CLIENT, attributes)
        call.notes[self] = _Made(span)
        return carried_in(trace.set_span_in_context(span, within))

    def call_ends(self, call: OutgoingCall) -> None:
        """Ends the span of a call, unless an error answers it."""
        made: _Made = call.notes[self]
        if call.frame is not None and call.has_failed:
            made.ended_ns = time.time_ns()  # Its type is known when the error is read.
            return
        if call.error is not None:
            _fail(made.span, call.error)
        made.span.end()

    def call_fails(self, call: OutgoingCall, error: BaseException) -> None:
        """Ends the span of a call with an error."""
        made: _Made = call.notes[self]
        if made.span.is_recording():
            _fail(made.span, error)
            made.span.end(made.ended_ns)

    def creation_sent(self, call: OutgoingCall, reference: ReferenceId) -> None:
        """Ends the span of a call that makes a value: nobody waits for its answer."""
        call.notes[self].span.end()  # Nobody waits for its answer.

    # Calls at their callee

    def around(self, call: IncomingCall, run: Callable[[], Any]) -> Any:
        """Runs what serves a call, or a part of that, in the context of its span."""
        noted = getattr(call, "notes", None)
        if noted is None:
            return run()
        served: _Served | None = noted.get(self)
        is_first = served is None
        if served is None:
            served = noted[self] = self._begin_served(call)
        token = contexts.attach(served.context)
        try:
            return run()
        finally:
            contexts.detach(token)
            if is_first and call.has_ended and served.span.is_recording():
                served.span.set_attribute("weft.cancelled", True)
                served.span.end()  # It was given up before its turn.

    def _begin_served(self, call: IncomingCall) -> _Served:
        function, carried = self.request_of(call)
        name = self.names.name_of(function)
        within = context_in(carried) if carried else Context()
        waited_s = time.monotonic() - call.arrived_s
        attributes = {**_about(name, call.peer.name), "weft.queue.duration": waited_s}
        arrived_ns = time.time_ns() - int(waited_s * _NS)
        span = self._tracer.start_span(
            name, within, SpanKind.SERVER, attributes, start_time=arrived_ns
        )
        return _Served(span, name, carried, trace.set_span_in_context(span, within))

    def serving_ends(self, call: IncomingCall, error: BaseException | None) -> None:
        """Ends the span of a served call."""
        served = self._served(call)
        if served is None or call.has_ended:
            return
        name = self.names.name_of(call.function)
        if name != served.name:
            served.span.update_name(name)
            served.span.set_attribute("rpc.method", name)
        if context_id := call.own_context_id:
            served.span.set_attribute("weft.autograd.context", context_id)
            self._keep(self._of_context, context_id, served.context)
        if error is not None:
            _fail(served.span, error)
        served.span.end()

    def _served(self, call: object) -> _Served | None:
        notes: dict[object, _Served] = getattr(call, "notes", {})
        return notes.get(self)

    def _context_of(self, call: object) -> Context | None:
        """Returns the context in which a served call runs, or was made by a thread here."""
        served = self._served(call)
        found: Context | None = getattr(call, "context", None) if served is None else served.context
        return found

    def context_here(self) -> object:
        """Returns the context of this thread."""
        return contexts.get_current()

    def run_batch(self, calls: Sequence[Any], function: Any, run: Callable[[], Any]) -> Any:
        """Runs a function once for several calls, in a span with links to their callers' spans."""
        links = [Link(each) for each in map(self._caller_of, calls) if each.is_valid]
        # Of a batch for one call, its parent is that call. A span has one parent at most.
        within = self._context_of(calls[0]) if len(calls) == 1 else None
        within = Context() if within is None else within
        name = self.names.name_of(function)
        attributes: dict[str, Any] = {"rpc.method": name, "weft.batch.calls": len(calls)}
        span = self._tracer.start_span(
            f"batch {name}", within, SpanKind.INTERNAL, attributes, links
        )
        with _inside(span, within):
            return run()

    def _caller_of(self, call: object) -> SpanContext:
        """Returns the span of the caller of a batched call; its own where the caller has none."""
        served = self._served(call)
        if served is not None and served.carried:
            found = context_in(served.carried)
        else:
            found = self._context_of(call) or Context()
        return trace.get_current_span(found).get_span_context()

    # Backward passes and optimizers

    def _keep(self, known: OrderedDict[K, V], key: K, value: V) -> V:
        """Keeps a value unless the key has one; returns that of the key."""
        with self._lock:
            kept = known.setdefault(key, value)
            if len(known) > MOST_CONTEXTS:
                known.popitem(last=False)
            return kept

    @contextlib.contextmanager
    def pass_runs(self, context_id: int) -> Iterator[None]:
        """Runs a backward pass in a span."""
        within = _current(self._context_of(served_call()))
        span = self._tracer.start_span(
            "backward", within, SpanKind.INTERNAL, {"weft.autograd.context": context_id}
        )
        with _inside(span, within):
            yield

    def span_before(self, worker: int, key: tuple[int, int]) -> bytes:
        """Returns the context of a pass for a worker that has not got it."""
        leader = worker_of(key[0])
        known = self._passes.get(key)
        if known is None and leader == self.me:  # The thread that leads a pass is that which sends.
            carried = carried_in(contexts.get_current())
            known = self._keep(self._passes, key, _Pass(carried))
        if known is None or worker in known.told or worker == leader:
            return b""
        known.told.add(worker)
        return known.carried

    def take_span(self, key: tuple[int, int], context: bytes) -> None:
        """Takes the context of the span of a pass, which another worker has sent."""
        self._keep(self._passes, key, _Pass(context))

    def part_runs(
        self,
        key: tuple[int, int],
        operations: Callable[[], dict[str, int]],
        work: Callable[[], tuple[list[Any], Any]],
    ) -> tuple[list[Any], Any]:
        """Runs a step of this worker's part of a pass in a span."""
        names, context_id = operations(), key[1]
        led = self._passes.get(key)
        within = _current(self._of_context.get(context_id) if led is None else led.context)
        attributes: dict[str, Any] = {
            "weft.autograd.context": context_id,
            "weft.autograd.operations": list(names),
        }
        name = f"backward {next(iter(names), 'leaves')}"
        span = self._tracer.start_span(name, within, SpanKind.INTERNAL, attributes)
        token = contexts.attach(trace.set_span_in_context(span, within))
        try:
            outgoing, progress = work()
        except BaseException as error:
            _fail(span, error)
            span.end()
            raise
        finally:
            contexts.detach(token)
        if progress.executed or outgoing:
            span.end()  # Otherwise nothing has run, and nobody hears of the span.
        return outgoing, progress

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Begins the span of a step of an optimizer; a hook of PyTorch."""
        name = f"step {type(optimizer).__name__}"
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        within = _current(self._context_of(served_call()))
        self._steps.spans[id(optimizer)] = self._tracer.start_span(
            name, within, SpanKind.INTERNAL, {"weft.optimizer.parameters": count}
        )

    def step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Ends it; a hook of PyTorch."""
        span = self._steps.spans.pop(id(optimizer), None)
        if span is not None:
            span.end()


class _Steps(threading.local):
    """The spans of steps of optimizers that run in a thread, by the id of the optimizer."""

    def __init__(self) -> None:
        self.spans: dict[int, Span] = {}


class _Made:
    """What is kept of a call at its caller: its span, and when an error answered it."""

    __slots__ = ("ended_ns", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.ended_ns: int | None = None


class _Served(NamedTuple):
    """What is kept of a served call.

    Attributes:
        span: Its span.
        name: The name of the span.
        carried: The context that the call carries; empty if its caller makes no spans.
        context: The context in which it runs.
    """

    span: Span
    name: str
    carried: bytes
    context: Context


def _about(name: str, peer: str) -> dict[str, Any]:
    return {"rpc.system.name": SYSTEM, "rpc.method": name, "weft.peer": peer}


def _current(otherwise: Context | None) -> Context:
    """Returns the context of the running code; another one where it is in no span."""
    found = contexts.get_current()
    if otherwise is None or trace.get_current_span(found).get_span_context().is_valid:
        return found
    return otherwise


@contextlib.contextmanager
def _inside(span: Span, within: Context) -> Iterator[None]:
    """Runs a block in a span, which ends with it and notes its error."""
    token = contexts.attach(trace.set_span_in_context(span, within))
    try:
        yield
    except BaseException as error:
        _fail(span, error)
        raise
    finally:
        contexts.detach(token)
        span.end()


def _fail(span: Span, error: BaseException) -> None:
    """Notes the error with which a call ended."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    span.set_attribute("error.type", name)
    span.set_status(Status(StatusCode.ERROR, name))


class Spans:
    """Makes spans of OpenTelemetry of what this worker does, in a block or until ``stop``.

    Each call makes a span at its caller and one at its callee, where spans are on there too. It
    carries the caller's context, so the spans of a step are one trace over all workers, and spans
    that the program itself makes in served functions are in it. A context that calls carry goes on
    through workers whose spans are on. Parts of backward passes and steps of optimizers are spans
    as well. Needs the extra ``otel``, and an SDK that the program sets up, on each worker.

    Args:
        tracer_provider: Makes the spans; None for the provider of the process.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = Tracer(tracer_provider)
        self._ends: list[Callable[[], object]] = []

    def start(self) -> Spans:
        """Makes spans from now on, until ``stop`` or until the worker leaves its group.

        Returns:
            This object.

        Raises:
            ObserveError: Spans are on already in this worker.
            NotInitialized: This process is no worker.
        """
        me, others = this_worker(), _SPANS.get()
        others.append(self)
        if self._ends or others[0] is not self:
            others.pop()
            raise ObserveError(f"spans are on already in worker {me.name!r}: stop those first")
        self._tracer.me = me.id
        self._ends = [
            others.clear,
            register_optimizer_step_pre_hook(self._tracer.step_begins).remove,
            register_optimizer_step_post_hook(self._tracer.step_ends).remove,
            on_leave(self.stop),
            watch(self._tracer),
        ]
        return self

    def stop(self) -> None:
        """Makes no further spans; nothing if none are made. Thread-safe."""
        ends, self._ends = self._ends, []
        for end in reversed(ends):
            end()

    def __enter__(self) -> Spans:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()


_SPANS: PerWorker[list[Spans]] = PerWorker(list)
"""The spans of a worker, while they are on: one at most."""
