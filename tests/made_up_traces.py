"""Made-up rows of two or three workers, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchweft.autograd.codec import PassMode, PassName, encode
from torchweft.engine.protocol.backward import Gradients, Progress
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind, encode_call, encode_reply
from torchweft.observe.tracing.chrome import SAME, Alignment, Traced
from torchweft.observe.tracing.notes import MADE, RAN, RECEIVED, SENT, SERVED, Row
from torchweft.observe.tracing.reading import BACKWARD
from torchweft.observe.tracing.slices import Slicer
from torchweft.reports import Lead
from torchweft.rpc.watching import Note, _notes_in

MAIN, SERVING = 11, 22
NAMES = {0: "trainer", 1: "server", 2: "other"}
CONTEXT = 77

Fields = tuple[Any, ...]
"""A row without its number."""


def worker(number: int, fields: Iterable[Fields], ends: dict[int, float] | None = None) -> Traced:
    """Returns what a worker has recorded, at its own time."""
    rows: list[Row] = [(place, *each) for place, each in enumerate(fields)]
    about = {
        "name": NAMES[number],
        "rank": number,
        "host": "here",
        "pid": 100 + number,
        "tracks": {MAIN: "MainThread", SERVING: "weft"},
    }
    slices = Slicer(rows, ends or {}, number, NAMES.__getitem__, [(0, 900)]).slices()
    used = {each.track for each in slices}
    about["tracks"] = {track: f"thread {track}" for track in sorted(used)}
    return Traced(about, slices, SAME)


def alignment(ahead_s: float, error_s: float) -> Alignment:
    lead = Lead(0.0, ahead_s, error_s)
    return Alignment(lead, lead._replace(at_s=10.0))


def control(kind: Kind, context: int, message: int) -> bytes:
    """Returns the control part of a message with 40 bytes of a small tensor."""
    if kind == Kind.REPLY:
        return encode_reply(context, message, (), b"value", b"t" * 40)
    if kind == Kind.GRADIENTS:
        name = PassName(context, 5, 4, PassMode())
        return encode(name, Gradients(message, (), Progress([1], [2])), 0, b"value") + b"t" * 40
    return encode_call(1.0, -1, context, message, b"m:f", b"", (), b"value", b"t" * 40)


def sent(
    peer: int,
    kind: Kind,
    number: int,
    at_s: float,
    more: int = 0,
    context: int = 0,
    message: int = 0,
) -> Fields:
    """Returns the row of a message with ``more`` bytes behind it."""
    thread = MAIN if kind == Kind.CALL else SERVING
    return SENT, at_s, thread, peer, *note(kind, number, more, context, message)


def note(kind: Kind, number: int, more: int, context: int, message: int) -> Note:
    """Returns what is kept of the message."""
    frame = encode_frame(kind, 0, number, control(kind, context, message))[0]
    ((size, *numbers, _, head),) = _notes_in([frame])
    return (size + more, *numbers, more, head)  # type: ignore[return-value]


def received(
    peer: int,
    kind: Kind,
    number: int,
    at_s: float,
    more: int = 0,
    context: int = 0,
    message: int = 0,
) -> Fields:
    """Returns the row of such a message at its receiver."""
    thread = SERVING if kind == Kind.CALL else MAIN
    return RECEIVED, at_s, thread, peer, *note(kind, number, more, context, message)


def call(
    number: int = 5, at_s: float = 1.0, *, ended_in: int = SERVING, is_async: bool = False
) -> tuple[list[Fields], list[Fields]]:
    """Returns the rows of the caller, worker 0, and of the callee.

    The call takes 100 ms: 20 ms to the callee, 10 ms in its queue, 40 ms for the function, 12 ms
    for the answer, 18 ms back.
    """
    ids = {"context": CONTEXT, "message": 10 * number}
    back = {"context": CONTEXT, "message": 10 * number + 1}
    caller = [
        sent(1, Kind.CALL, number, at_s, **ids),
        received(1, Kind.REPLY, number, at_s + 0.1, **back),
        (MADE, at_s, at_s + 0.1, MAIN, 1, number, "model.forward", -1, 0, is_async, False),
    ]
    times = at_s + 0.02, at_s + 0.03, at_s + 0.07
    callee = [
        received(0, Kind.CALL, number, at_s + 0.02, **ids),
        (SERVED, *times, SERVING, ended_in, 0, number, -1, "model.forward", CONTEXT, False),
        sent(0, Kind.REPLY, number, at_s + 0.08, **back),
    ]
    return caller, callee


ANSWERED = {1: 1.082}
"""When the answer of the callee's call was written."""


def step() -> list[Traced]:
    """Returns a call and the gradients that go back along it."""
    caller, callee = call()
    ids = {"context": CONTEXT, "message": 51}
    caller.append(sent(1, Kind.GRADIENTS, 3, 1.2, **ids))
    callee.append(received(0, Kind.GRADIENTS, 3, 1.22, **ids))
    operations = {"MulBackward0": 2, "SumBackward0": 1}
    details = (("operations", operations), ("messages", (51,)), ("answered", ()))
    callee.append((RAN, 1.23, 1.25, SERVING, BACKWARD, "MulBackward0", CONTEXT, details))
    callee.append((RAN, 1.9, 2.0, SERVING, "optimizer", "SGD", 0, (("parameters", 2),)))
    return [worker(0, caller), worker(1, callee, ANSWERED)]
