"""The rows, sides and targets of the benchmark of large tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.frame import (
    GIGABYTES_PER_S,
    Form,
    Question,
    Row,
    Target,
    at_least_of_limit,
    times_faster,
)
from benchmarks.tensors.links import SIDES, measure_over_links
from benchmarks.tensors.payloads import (
    ECHO,
    GIB,
    HUNDRED,
    IN_FLIGHT,
    MIB,
    ONE_WAY,
    OVERLAPPING,
    PAYLOADS,
    Payload,
)

# Every payload moves this many bytes a round, within the bounds on operations.
ROUND_BYTES = 768 * MIB
LEAST_OPERATIONS = 2
MOST_OPERATIONS = 200


class Link(NamedTuple):
    """A link between caller and callee: its name in titles, and the sides compared on it."""

    title: str
    ours: str
    torch: str
    limit: str


ONE_HOST = Link("one host", "weft", "torch", "copy")
TCP = Link("TCP loopback", "weft tcp", "torch tcp", "tcp socket")
TLS = Link("TLS loopback", "weft tls", "", "tls socket")
NAMESPACES = Link("TCP namespaces", "weft namespaces", "torch namespaces", "namespaces socket")
# For comparison: a raw Unix socket with the same payloads, beside the copy.
UNIX = Link("Unix socket", "unix socket", "", "copy")

COPY_TARGETS = (times_faster(5), at_least_of_limit(0.8))
TCP_TARGETS = (at_least_of_limit(0.9),)
TLS_TARGETS = (at_least_of_limit(0.7),)
SHORT = {
    ONE_HOST: (MIB, 16 * MIB, 256 * MIB),
    TCP: (16 * MIB, 256 * MIB),
    TLS: (16 * MIB, 256 * MIB),
}


def _targets(link: Link, payload: Payload) -> tuple[Target, ...]:
    if payload.way != "one way" or payload.tensors > 1 or payload.size_bytes == GIB:
        return ()
    if link == ONE_HOST and payload.size_bytes >= MIB:
        return COPY_TARGETS
    over_sockets = {TCP: TCP_TARGETS, TLS: TLS_TARGETS} if payload.size_bytes >= 16 * MIB else {}
    return over_sockets.get(link, ())


def _rows(link: Link, payloads: Iterable[Payload]) -> Iterator[Row]:
    for payload in payloads:
        operations = min(MOST_OPERATIONS, ROUND_BYTES // payload.moved_bytes)
        targets = _targets(link, payload)
        what = payload.name.replace("in flight", f"{IN_FLIGHT} in flight")
        yield Row(
            f"{link.title}: {payload.name}",
            f"{link.title}, {what}",
            operations=max(operations, payload.overlapping, LEAST_OPERATIONS),
            unit=GIGABYTES_PER_S,
            amount=payload.moved_bytes,
            work=payload.name,
            ours=link.ours,
            torch=link.torch,
            limit=link.limit,
            targets=targets,
            is_short=bool(targets) and payload.size_bytes in SHORT[link],
            warm_up=max(LEAST_OPERATIONS, min(10, operations // 4)),
        )


def _of_sizes(payloads: Iterable[Payload], *sizes: int) -> list[Payload]:
    return [payload for payload in payloads if payload.size_bytes in sizes]


QUESTION = Question(
    "benchmarks.tensors",
    "Large tensors",
    (
        *_rows(ONE_HOST, PAYLOADS),
        *_rows(UNIX, _of_sizes(ONE_WAY, MIB, 16 * MIB, 256 * MIB)),
        *_rows(TCP, PAYLOADS),
        *_rows(TLS, _of_sizes(ONE_WAY, MIB, 16 * MIB, 64 * MIB, 256 * MIB)),
        *_rows(TLS, _of_sizes([*ECHO, *OVERLAPPING], 16 * MIB)),
        *_rows(NAMESPACES, _of_sizes(ONE_WAY, MIB, 16 * MIB, 256 * MIB)),
        *_rows(NAMESPACES, _of_sizes([*ECHO, *OVERLAPPING], 16 * MIB)),
        *_rows(NAMESPACES, _of_sizes(HUNDRED, MIB)),
    ),
    sides=SIDES,
    about="Calls with tensors, answered by nothing; echo: by the same, and both ways count.",
    full=Form(rounds=3, placements=("a core each", "not pinned")),
    short=Form(rounds=3, placements=("a core each",)),
    measure=measure_over_links,
)
