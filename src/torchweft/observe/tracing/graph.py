"""The distributed graph of an autograd context, as a trace shows it: as text, and as a picture.

The picture has a line for each worker, from the top to the bottom, and an arrow for each message,
in the order of time. The distance of two arrows is no measure of time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from torchweft.errors import ObserveError
from torchweft.observe.text import seconds, size
from torchweft.observe.tracing.reading import (
    ON_CONNECTION,
    RECEIVE,
    SEND,
    Slice,
    TraceFile,
    telling_damage,
)
from torchweft.observe.tracing.records import BACKWARD

_FORWARD, _BACKWARD = "forward", "backward"
_KINDS = {
    "call": "call",
    "reply": "result",
    "post": "values",
    "gradients": "gradients",
}
"""The messages of the graph, by their kind, and how the graph names them."""
_MOST_DRAWN = 400
_LEFT, _TOP, _ROW, _COLUMN = 110.0, 86.0, 26.0, 250.0
_COLOURS = {_FORWARD: "#2f6fb5", _BACKWARD: "#c2571a"}
_STYLE = (
    "text{font-family:sans-serif;fill:#1f2933}"
    ".title{font-size:15px;font-weight:bold}"
    ".name{font-size:13px;font-weight:bold;text-anchor:middle}"
    ".note{font-size:11px;text-anchor:middle}"
    ".time{font-size:11px;fill:#52606d}"
)


class Edge(NamedTuple):
    """A message of the graph.

    Attributes:
        direction: ``"forward"``, or ``"backward"`` for gradients.
        sender: The name of the sender.
        receiver: The name of the receiver.
        what: The kind of the message, and the function of its call.
        size_bytes: Its bytes, tensors of all channels included.
        channels: Bytes of tensors by channel.
        at_s: When it was sent, in seconds since the first message.
        taken_s: Time from sending to receiving, in seconds; -1 if one end is missing.
        message_id: Number of the recorded message; 0 for one without tensors that need gradients.
    """

    direction: str
    sender: str
    receiver: str
    what: str
    size_bytes: int
    channels: dict[str, int]
    at_s: float
    taken_s: float
    message_id: int


class Part(NamedTuple):
    """Parts of the backward pass that ran on one worker.

    Attributes:
        worker: The name of the worker.
        runs: How many parts ran.
        taken_s: How long they took together, in seconds.
        operations: The names of their operations, and how many there were.
    """

    worker: str
    runs: int
    taken_s: float
    operations: dict[str, int]


class Graph(NamedTuple):
    """The distributed graph of a context.

    Attributes:
        context_id: The number of the context.
        workers: The names of the workers, by rank.
        edges: The messages in the order of time.
        parts: The backward pass on each worker that has a part of it.
    """

    context_id: int
    workers: tuple[str, ...]
    edges: tuple[Edge, ...]
    parts: tuple[Part, ...]

    def text(self) -> str:
        """Returns the graph as text: sums for each pair of workers, the passes, the messages."""
        lines = [
            f"context {self.context_id}: {len(self.workers)} workers, {len(self.edges)} messages, "
            f"{size(sum(each.size_bytes for each in self.edges))}"
        ]
        sums: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
        for edge in self.edges:
            sums[edge.direction, edge.sender, edge.receiver].append(edge)
        for (direction, sender, receiver), edges in sums.items():
            times = [edge.taken_s for edge in edges if edge.taken_s >= 0]
            time = f", {seconds(sum(times))} on the way" if times else ""
            total = size(sum(edge.size_bytes for edge in edges))
            lines.append(
                f"  {direction:8}  {sender} -> {receiver}: {_messages(len(edges))}, {total}{time}"
            )
        for part in self.parts:
            names = ", ".join(_times(name, count) for name, count in part.operations.items())
            lines.append(
                f"  backward  on {part.worker}: {seconds(part.taken_s)} in {part.runs} "
                f"part{'s' if part.runs > 1 else ''}: {names or 'leaves'}"
            )
        lines.append("messages, in the order of time")
        lines += [f"  {_line(edge)}" for edge in self.edges]
        return "\n".join(lines)

    def svg(self) -> str:
        """Returns the graph as a picture in SVG."""
        return "\n".join(_draw(self))


def graph_of(trace: TraceFile, context_id: int) -> Graph:
    """Returns the graph of a context.

    Raises:
        ObserveError: No message of the context is in the trace; the error names those that are.
            Or the trace is damaged.
    """
    with telling_damage():
        return _graph_of(trace, context_id)


def _graph_of(trace: TraceFile, context_id: int) -> Graph:
    sent = [each for each in trace.slices if each.category == SEND and each.args["kind"] in _KINDS]
    found = [each for each in sent if each.args.get("context") == context_id]
    if not found:
        others = sorted({each.args["context"] for each in sent if "context" in each.args})
        known = f"it has those of {', '.join(map(str, others))}" if others else "it has none at all"
        raise ObserveError(f"the trace has no message of autograd context {context_id}; {known}")
    received = {each.flow: each for each in trace.slices if each.category == RECEIVE and each.is_in}
    edges = [_edge(each, received.get(each.flow), found[0].began_s) for each in found]
    present = {name for edge in edges for name in (edge.sender, edge.receiver)}
    names = [name for name in trace.workers if name in present]
    names += sorted(present.difference(names))
    return Graph(context_id, tuple(names), tuple(edges), tuple(_parts(trace, context_id)))


def _edge(sent: Slice, received: Slice | None, begin_s: float) -> Edge:
    args = sent.args
    channels: dict[str, int] = args.get("tensors", {})
    apart = sum(count for name, count in channels.items() if name not in ON_CONNECTION)
    return Edge(
        _BACKWARD if args["kind"] == "gradients" else _FORWARD,
        sent.worker,
        args["to"],
        " ".join(filter(None, (_KINDS[args["kind"]], args.get("function", "")))),
        args["bytes"] + apart,
        channels,
        sent.began_s - begin_s,
        -1.0 if received is None else max(received.began_s - sent.began_s, 0.0),
        args.get("message", 0),
    )


def _parts(trace: TraceFile, context_id: int) -> Iterator[Part]:
    for worker in trace.workers:
        runs, taken_s = 0, 0.0
        operations: dict[str, int] = defaultdict(int)
        for each in trace.slices:
            is_part = each.category == BACKWARD and each.args.get("context") == context_id
            if is_part and each.worker == worker:
                runs += 1
                taken_s += each.ended_s - each.began_s
                for name, count in each.args["operations"].items():
                    operations[name] += count
        if runs:
            yield Part(worker, runs, taken_s, dict(operations))


def _line(edge: Edge) -> str:
    taken = f", {seconds(edge.taken_s)}" if edge.taken_s >= 0 else ""
    channels = ", ".join(f"{name} {size(count)}" for name, count in edge.channels.items())
    tensors = f" ({channels})" if channels else ""
    arrow = f"{edge.sender} -> {edge.receiver}"
    return f"{seconds(edge.at_s):>9}  {arrow}  {edge.what}: {size(edge.size_bytes)}{tensors}{taken}"


def _messages(count: int) -> str:
    return f"{count} message{'s' if count > 1 else ''}"


def _times(name: str, count: int) -> str:
    return f"{name} x {count}" if count > 1 else name


def _draw(graph: Graph) -> Iterator[str]:
    drawn = graph.edges[:_MOST_DRAWN]
    x_of = {name: _LEFT + 60 + place * _COLUMN for place, name in enumerate(graph.workers)}
    bottom = _TOP + (len(drawn) + 1) * _ROW
    width, height = max(x_of.values()) + 120, bottom + 24 + 18 * len(graph.parts)
    title = graph.text().split("\n", 1)[0]
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">'
    )
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    yield "<defs>"
    for direction, colour in _COLOURS.items():
        yield (
            f'<marker id="{direction}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        )
    yield '</defs><rect width="100%" height="100%" fill="#fff"/>'
    yield f'<text class="title" x="12" y="24">{escape(title)}</text>'
    for place, (direction, colour) in enumerate(_COLOURS.items()):
        left = 12 + 110 * place
        yield f'<path d="M{left} 42h24" stroke="{colour}" marker-end="url(#{direction})"/>'
        yield f'<text class="time" x="{left + 30}" y="46">{direction}</text>'
    for name, x in x_of.items():
        yield f'<text class="name" x="{x:.0f}" y="{_TOP - 14:.0f}">{escape(name)}</text>'
        yield f'<path d="M{x:.0f} {_TOP - 6:.0f}V{bottom:.0f}" stroke="#c5ccd4"/>'
    for place, edge in enumerate(drawn):
        yield from _arrow(edge, x_of, _TOP + (place + 1) * _ROW)
    y = bottom + 18
    if len(graph.edges) > len(drawn):
        more = len(graph.edges) - len(drawn)
        yield f'<text class="time" x="12" y="{y - 4:.0f}">and {_messages(more)} more</text>'
    for part in graph.parts:
        names = ", ".join(_times(name, count) for name, count in part.operations.items())
        told = f"backward on {part.worker}: {seconds(part.taken_s)}: {names or 'leaves'}"
        yield f'<text class="time" x="12" y="{y + 8:.0f}">{escape(told)}</text>'
        y += 18
    yield "</svg>"
    yield ""


def _arrow(edge: Edge, x_of: dict[str, float], y: float) -> Sequence[str]:
    begin, end = x_of[edge.sender], x_of[edge.receiver]
    colour = _COLOURS[edge.direction]
    taken = f", {seconds(edge.taken_s)}" if edge.taken_s >= 0 else ""
    label = f"{edge.what.rsplit('.', 1)[-1]}, {size(edge.size_bytes)}{taken}"
    return (
        f"<g><title>{escape(_line(edge))}</title>",
        f'<text class="time" x="12" y="{y + 4:.0f}">{seconds(edge.at_s)}</text>',
        f'<path d="M{begin:.0f} {y:.0f}H{end:.0f}" stroke="{colour}" stroke-width="1.4" '
        f'marker-end="url(#{edge.direction})"/>',
        f'<text class="note" x="{(begin + end) / 2:.0f}" y="{y - 4:.0f}">{escape(label)}</text>',
        "</g>",
    )
