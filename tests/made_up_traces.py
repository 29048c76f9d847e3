"""Made-up records of two or three workers, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable

from torchweft.engine.protocol.observing import Lead
from torchweft.engine.wire.messages import Kind
from torchweft.observe.tracing.joining import Joined, join
from torchweft.observe.tracing.records import (
    BACKWARD,
    SAME,
    Alignment,
    Made,
    Ran,
    Received,
    Record,
    Sent,
    Served,
    Thread,
    WorkerTrace,
)

MAIN, SERVING = 11, 22
NAMES = {0: "trainer", 1: "server", 2: "other"}
CONTEXT = 77


def worker(number: int, records: Iterable[Record], ahead_s: float = 0.0) -> WorkerTrace:
    """Returns the records of a worker, which were made at its own time."""
    return WorkerTrace(
        id=number,
        name=NAMES[number],
        rank=number,
        host="here",
        pid=100 + number,
        began_s=ahead_s,
        ended_s=10.0 + ahead_s,
        peers=NAMES,
        threads={MAIN: Thread(1000 + number, "MainThread"), SERVING: Thread(2000 + number, "weft")},
        own_calls=frozenset({(0, 900)}),
        links=(),
        dropped=0,
        records=list(records),
        profiled=[],
        profiled_dropped=0,
    )


def alignment(ahead_s: float, error_s: float) -> Alignment:
    lead = Lead(0.0, ahead_s, error_s)
    return Alignment(lead, lead._replace(at_s=10.0))


def sent(peer: int, kind: Kind, number: int, at_s: float, size: int = 100, **others: int) -> Sent:
    ids = {"context_id": 0, "message_id": 0, "creation": -1, "inline_bytes": 0, "stream_bytes": 0}
    thread = MAIN if kind == Kind.CALL else SERVING
    return Sent(at_s, at_s + 0.001, thread, peer, int(kind), number, size, **{**ids, **others})


def received(
    peer: int, kind: Kind, number: int, at_s: float, size: int = 100, **others: int
) -> Received:
    ids = {"context_id": 0, "message_id": 0, "creation": -1, **others}
    thread = SERVING if kind == Kind.CALL else MAIN
    return Received(at_s, thread, peer, int(kind), number, size, **ids)


def call(
    number: int = 5, at_s: float = 1.0, ahead_s: float = 0.0, context: int = CONTEXT
) -> tuple[list[Record], list[Record]]:
    """Returns the records of the caller, worker 0, and of the callee, whose clock is ahead.

    The call takes 100 ms: 20 ms to the callee, 10 ms in its queue, 40 ms for the function, 10 ms
    for the answer, 20 ms back.
    """
    ids = {"context_id": context, "message_id": 10 * number}
    back = {"context_id": context, "message_id": 10 * number + 1}
    there_s = at_s + ahead_s
    caller: list[Record] = [
        sent(1, Kind.CALL, number, at_s, inline_bytes=40, **ids),
        received(1, Kind.REPLY, number, at_s + 0.1, 60, **back),
        Made(at_s, at_s + 0.1, MAIN, 1, number, "model.forward", -1, 0, False, False),
    ]
    callee: list[Record] = [
        received(0, Kind.CALL, number, there_s + 0.02, **ids),
        Served(
            there_s + 0.02,
            there_s + 0.03,
            there_s + 0.07,
            there_s + 0.082,
            SERVING,
            SERVING,
            0,
            number,
            -1,
            "model.forward",
            context,
            False,
        ),
        sent(0, Kind.REPLY, number, there_s + 0.08, 60, **back),
    ]
    return caller, callee


def gradients(ahead_s: float = 0.0) -> tuple[list[Record], list[Record]]:
    """Returns the records of gradients from worker 0 to worker 1, and of the part that runs."""
    ids = {"context_id": CONTEXT, "message_id": 51}
    operations = {"MulBackward0": 2, "SumBackward0": 1}
    details = (("operations", operations), ("messages", (51,)), ("answered", ()))
    there_s = 2.0 + ahead_s
    ran = (there_s + 0.03, there_s + 0.05, SERVING, BACKWARD, "MulBackward0", CONTEXT, details)
    return (
        [sent(1, Kind.GRADIENTS, 3, 2.0, 80, **ids)._replace(thread=MAIN)],
        [received(0, Kind.GRADIENTS, 3, there_s + 0.02, 80, **ids), Ran(*ran)],
    )


def step(ahead_s: float = 5.0) -> Joined:
    """Returns a call and its gradients, joined; the clock of worker 1 is ahead."""
    caller, callee = call(ahead_s=ahead_s)
    here, there = gradients(ahead_s)
    return join(
        [
            (worker(0, caller + here), SAME),
            (worker(1, callee + there, ahead_s), alignment(ahead_s, 0.001)),
        ]
    )
