"""Makes the spans, by the API of OpenTelemetry.

A call is watched as counters and traces watch it: a subclass takes the place of its type, and ends
the span in the one method that every call ends by. Names of attributes are those of the semantic
conventions for RPC.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
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

from torchweft.agent.calls import PendingCall
from torchweft.agent.peers import Peer
from torchweft.agent.served_calls import current_call
from torchweft.autograd.contexts import current_id
from torchweft.autograd.graph import LocalPass, Outgoing
from torchweft.ids import ReferenceId
from torchweft.observe.telemetry.carrying import MOST_CONTEXTS, Passes, carried_in, context_in
from torchweft.protocol.backward import Progress
from torchweft.protocol.calls import ServedCall
from torchweft.rpc.completion import Call
from torchweft.rpc.counting import name_of
from torchweft.rpc.requests import Request
from torchweft.rpc.serving import InSpan
from torchweft.rpc.stack_report import named_in
from torchweft.rpc.tracing.passes import operations_due
from torchweft.rpc.watching import Carrier, Watcher
from torchweft.rpc.worker import Batches
from torchweft.version import VERSION
from torchweft.wire.frames import Frame
from torchweft.wire.messages import ERROR_REPLY, NO_GRAD, Kind, in_span

SYSTEM = "torchweft"
_CALL_IN_SPAN = int(Kind.CALL_IN_SPAN)
_NS = 1_000_000_000


class Tracer:
    """Makes the spans of one worker. Thread-safe.

    Args:
        provider: Makes the tracer; None for the provider of the process.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer(SYSTEM, VERSION, tracer_provider=provider)
        self._thread = _OfThread()
        self._of_context: OrderedDict[int, Context] = OrderedDict()
        self._passes = Passes()
        self._lock = threading.Lock()

    def watcher(self, me: int) -> Watcher:
        """Returns what has the calls and passes of the worker with this id make spans."""
        self._passes.me = me
        carrier = Carrier(
            self._request,
            self._result_of,
            self._run_pass,
            self._take_context,
            self._around,
            Batches(self._run_batch, contexts.get_current),
            self._passes.encode,
            self._passes.take_span,
        )
        return Watcher(
            self._pending,
            self._served,
            self._note_creation,
            is_brief=True,
            parts=self._parts,
            carrier=carrier,
        )

    # Calls at their caller

    def _request(
        self, request: Callable[..., Request], peer: Peer, function: Any, *args: Any
    ) -> Request | _Carrying:
        """Returns a request that carries the context of the span that its call makes."""
        made = request(peer, function, *args)
        if function == b"":  # Values for a port: no call.
            return made
        carrying = self._thread.request = _Carrying(self, made, peer, function)
        return carrying

    def begin_call(
        self, callee: str, function: Any, parent: ServedCall | None, request: _Carrying | None
    ) -> Span:
        """Begins the span of a call at its caller; its request carries the context from then on."""
        name = name_of(function)
        attributes = {**_about(name, callee), "server.address": callee}
        context_id = current_id()
        if context_id:
            attributes["weft.autograd.context"] = context_id
        within = _current(getattr(parent, "context", None))
        span = self._tracer.start_span(name, within, SpanKind.CLIENT, attributes)
        if request is not None:
            # Here: the message may be made by another thread, when there is a connection.
            request.span = span
            request.carried = carried_in(trace.set_span_in_context(span, within))
        return span

    def _pending(self, base: type[PendingCall]) -> type[PendingCall]:
        init, finish = base.__init__, base.finish
        thread, begin_call = self._thread, self.begin_call

        class Spanned(base):  # type: ignore[valid-type, misc]
            """A call that has a span, which ends before those that wait for it go on."""

            __slots__ = ("ended_ns", "span")

            def __init__(
                self,
                worker: int,
                worker_name: str,
                function: Any,
                timeout_s: float,
                on_done: Callable[[PendingCall], None] | None = None,
                parent: ServedCall | None = None,
            ) -> None:
                init(self, worker, worker_name, function, timeout_s, on_done, parent)
                request, thread.request = thread.request, None
                self.span = begin_call(worker_name, function, parent, request)

            def finish(self) -> None:
                frame, error, span = self.frame, self.error, self.span
                if frame is not None and frame[1] & ERROR_REPLY:
                    self.ended_ns = time.time_ns()  # Its type is known when the error is read.
                else:
                    if error is not None:
                        _fail(span, error)
                    span.end()
                finish(self)

        return Spanned

    def _result_of(self, result_of: Callable[[PendingCall], Any], call: Any) -> Any:
        """Returns the result of a call; if that is an error, the span of the call ends here."""
        ended_ns = getattr(call, "ended_ns", 0)
        try:
            return result_of(call)
        except BaseException as error:
            if ended_ns and call.span.is_recording():
                _fail(call.span, error)
                call.span.end(ended_ns)
            raise

    def _note_creation(self, function: Any, _: ReferenceId) -> None:
        """Ends the span of a call for whose answer nobody waits: it has been sent."""
        request, self._thread.request = self._thread.request, None
        if request is not None and request.span is not None:
            _rename(request.span, name_of(function))  # A method was sent as one of a reference.
            request.span.end()

    # Calls at their callee

    def _take_context(self, call: Any, carried: bytes) -> None:
        if isinstance(call, _Spanned):
            call.carried = carried  # type: ignore[attr-defined]

    def _served(self, base: type[Call]) -> type[Call]:
        answer = base.__call__
        note_context = self._note_context

        class Spanned(base, _Spanned):  # type: ignore[valid-type, misc]
            """A served call that has a span, which ends before its caller goes on."""

            __slots__ = ("carried", "context", "name", "span")

            def __call__(self, result: Any, error: BaseException | None) -> None:
                if not self.has_ended and getattr(self, "span", None) is not None:
                    name = name_of(self.function)
                    if name != self.name:
                        _rename(self.span, name)
                    context_id = getattr(self, "context_id", 0)
                    if context_id and context_id != NO_GRAD:
                        self.span.set_attribute("weft.autograd.context", context_id)
                        note_context(context_id, self.context)
                    if error is not None:
                        _fail(self.span, error)
                    self.span.end()
                answer(self, result, error)

        return Spanned

    def _around(self, call: Any, run: Callable[[], Any]) -> Any:
        """Runs what serves a call, or a part of that, in the context of its span."""
        if not isinstance(call, _Spanned):
            return run()
        found: Any = call
        is_first = getattr(found, "span", None) is None
        if is_first:
            self._begin_served(found)
        token = contexts.attach(found.context)
        try:
            return run()
        finally:
            contexts.detach(token)
            if is_first and found.has_ended and found.span.is_recording():
                found.span.set_attribute("weft.cancelled", True)
                found.span.end()  # It was given up before its turn.

    def _begin_served(self, call: Any) -> None:
        carried = getattr(call, "carried", b"")
        within = context_in(carried) if carried else Context()
        frame = call.frame
        call.name = name = name_of(named_in(frame) if frame is not None else call.function)
        waited_s = time.monotonic() - call.arrived_s
        attributes = {**_about(name, call.peer.name), "weft.queue.duration": waited_s}
        arrived_ns = time.time_ns() - int(waited_s * _NS)
        call.span = self._tracer.start_span(
            name, within, SpanKind.SERVER, attributes, start_time=arrived_ns
        )
        call.context = trace.set_span_in_context(call.span, within)

    def _run_batch(self, calls: Sequence[Any], function: Any, run: Callable[[], Any]) -> Any:
        """Runs a function once for several calls, in a span with links to their callers' spans."""
        links = [Link(each) for each in map(_caller_of, calls) if each.is_valid]
        # Of a batch for one call, its parent is that call. A span has one parent at most.
        within = getattr(calls[0], "context", None) if len(calls) == 1 else None
        within = Context() if within is None else within
        name = name_of(function)
        attributes: dict[str, Any] = {"rpc.method": name, "weft.batch.calls": len(calls)}
        span = self._tracer.start_span(
            f"batch {name}", within, SpanKind.INTERNAL, attributes, links
        )
        with _inside(span, within):
            return run()

    # Backward passes and optimizers

    def _note_context(self, context_id: int, of_call: Context) -> None:
        """Notes the call that begins an autograd context here, for its backward passes."""
        if context_id not in self._of_context:
            with self._lock:
                self._of_context[context_id] = of_call
                if len(self._of_context) > MOST_CONTEXTS:
                    self._of_context.popitem(last=False)

    def _run_pass(
        self, run: Callable[..., None], context_id: int, *args: Any, **kwargs: Any
    ) -> None:
        """Leads a backward pass, in a span."""
        served = getattr(current_call.get(), "context", None)
        within = _current(served)
        span = self._tracer.start_span(
            "backward", within, SpanKind.INTERNAL, {"weft.autograd.context": context_id}
        )
        with _inside(span, within):
            run(context_id, *args, **kwargs)

    def _parts(self, base: type[LocalPass]) -> type[LocalPass]:
        tracer, of_context, passes = self._tracer, self._of_context, self._passes

        class Spanned(base):  # type: ignore[valid-type, misc]
            """Makes a span of each part of a pass that runs on this worker."""

            def work(self) -> tuple[list[Outgoing], Progress]:
                names, context_id = operations_due(self), self._context.id
                of_pass = passes.context_of((self.pass_id, context_id))
                within = _current(of_pass or of_context.get(context_id))
                attributes = {
                    "weft.autograd.context": context_id,
                    "weft.autograd.operations": list(names),
                }
                name = f"backward {next(iter(names), 'leaves')}"
                span = tracer.start_span(name, within, SpanKind.INTERNAL, attributes)
                token = contexts.attach(trace.set_span_in_context(span, within))
                try:
                    outgoing, progress = super().work()
                except BaseException as error:
                    _fail(span, error)
                    span.end()
                    raise
                finally:
                    contexts.detach(token)
                if progress.executed or outgoing:
                    span.end()  # Otherwise nothing has run, and nobody hears of the span.
                return outgoing, progress

        return Spanned

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Begins the span of a step of an optimizer; a hook of PyTorch."""
        name = f"step {type(optimizer).__name__}"
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        served = getattr(current_call.get(), "context", None)
        self._thread.steps[id(optimizer)] = self._tracer.start_span(
            name, _current(served), SpanKind.INTERNAL, {"weft.optimizer.parameters": count}
        )

    def step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Ends it; a hook of PyTorch."""
        span = self._thread.steps.pop(id(optimizer), None)
        if span is not None:
            span.end()


class _OfThread(threading.local):
    """What one function of a thread leaves for the next one.

    Attributes:
        request: The request whose call is made next.
        steps: The spans of steps of optimizers that run, by the id of the optimizer.
    """

    request: _Carrying | None = None

    def __init__(self) -> None:
        self.steps: dict[int, Span] = {}


class _Carrying:
    """A request that carries the context of a span; see ``requests.Request``."""

    __slots__ = ("_function", "_peer", "_request", "_tracer", "carried", "span")

    def __init__(self, tracer: Tracer, request: Request, peer: Peer, function: Any) -> None:
        self._tracer = tracer
        self._request = request
        self._peer = peer
        self._function = function
        self.span: Span | None = None
        """The span of the call; of a call that makes a value, None until it is sent."""
        self.carried = b""
        """The context of the span, as the call carries it."""

    def message(self, number: int) -> Any:
        """Returns the message to send, under the number of its call."""
        if self.span is None and not number:
            self._tracer.begin_call(self._peer.name, self._function, current_call.get(), self)
        message, carried = self._request.message(number), self.carried
        if not carried:
            return message
        if isinstance(message, Frame):  # It goes to this worker itself.
            control = InSpan(message.kind, carried, message.control)
            return message._replace(kind=_CALL_IN_SPAN, control=control)  # type: ignore[arg-type]
        return in_span(message, carried)

    def take_back(self, *, keeps_graph: bool = False) -> None:
        """Takes back the references and the graph of a message that could not be sent."""
        span = self.span
        if span is not None and span.is_recording():
            _fail(span, sys.exc_info()[1] or ConnectionError())
            span.end()
        self._request.take_back(keeps_graph=keeps_graph)


class _Spanned:
    """What the types of served calls that have spans have in common."""

    __slots__ = ()


def _rename(span: Span, name: str) -> None:
    span.update_name(name)
    span.set_attribute("rpc.method", name)


def _about(name: str, peer: str) -> dict[str, Any]:
    return {"rpc.system.name": SYSTEM, "rpc.method": name, "weft.peer": peer}


def _caller_of(call: Any) -> SpanContext:
    """Returns the span of the caller of a batched call; that of the call itself if it has none."""
    carried = getattr(call, "carried", b"")
    found = context_in(carried) if carried else getattr(call, "context", None) or Context()
    return trace.get_current_span(found).get_span_context()


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
