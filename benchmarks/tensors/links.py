"""The links between caller and callee that are compared, and the sides of each."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.frame import Question, Side
from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import Cores
from benchmarks.tensors.certificates import certificate
from benchmarks.tensors.namespaces import ADDRESSES, INTERFACE, NotPermitted, two_namespaces
from torchweft.knobs import INTERNAL_VARIABLE

# Over TCP as between two hosts: no Unix socket, and nothing that needs the same host's memory.
NEVER = 1 << 62
WEFT_TCP = {INTERNAL_VARIABLE: f"UNIX_SOCKETS=0,CMA_FROM_BYTES={NEVER},SHM_FROM_BYTES={NEVER}"}
TORCH_TCP = {"_transports": ["uv"], "_channels": ["basic"]}

# The interface that a side's processes check, and their address; see cargo.py and streaming.py.
LOOPBACK = {"BENCHMARK_INTERFACE": "lo"}
CABLE = {"BENCHMARK_INTERFACE": INTERFACE, "BENCHMARK_ADDRESS": ADDRESSES[1]}

NAMESPACES_SIDES = (
    Side("weft namespaces", api="weft", environment={**WEFT_TCP, **CABLE}),
    Side(
        "torch namespaces",
        api="torch",
        environment={"TP_SOCKET_IFNAME": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE, **CABLE},
        options=TORCH_TCP,
    ),
    Side("namespaces socket", runner="raw", environment=CABLE),
)
TLS_SIDES = (
    Side("weft tls", api="weft", environment={**WEFT_TCP, **LOOPBACK}),
    Side("tls socket", runner="raw", environment=LOOPBACK),
)
SIDES = (
    Side("torch", api="torch"),
    Side("weft", api="weft"),
    Side("copy", runner="alone"),
    Side("unix socket", runner="raw"),
    Side("torch tcp", api="torch", environment=LOOPBACK, options=TORCH_TCP),
    Side("weft tcp", api="weft", environment={**WEFT_TCP, **LOOPBACK}),
    Side("tcp socket", runner="raw", environment=LOOPBACK),
    *TLS_SIDES,
    *NAMESPACES_SIDES,
)


def measure_over_links(question: Question, options: Namespace, cores: Cores) -> Rounds:
    """Measures link by link, and starts only the sides that the chosen rows name.

    With the processes of all links at once, 1 GiB would not fit into the memory of many machines.
    """
    rounds: dict[tuple[str, str], Sequence[Round]] = {}
    plain = dataclasses.replace(question, measure=None)
    for ours in dict.fromkeys(row.ours for row in options.rows):
        rows = [row for row in options.rows if row.ours == ours]
        named = {name for row in rows for name in (row.ours, row.torch, row.limit)}
        with sides_in_place([side for side in options.sides if side.name in named]) as sides:
            chosen = Namespace(**{**vars(options), "rows": rows, "sides": sides})
            rounds.update(measure(plain, chosen, cores))
    return rounds


@contextlib.contextmanager
def sides_in_place(sides: Sequence[Side]) -> Iterator[list[Side]]:
    """Makes the namespaces and certificates that sides need; skips sides that cannot have them."""
    with contextlib.ExitStack() as ends:
        ready = list(sides)
        for kind, needed, make, furnish in (
            (NAMESPACES_SIDES, "network namespaces", two_namespaces, _put_inside),
            (TLS_SIDES, "TLS", certificate, _with_variables),
        ):
            chosen = [side for side in ready if side in kind]
            ready = [side for side in ready if side not in kind]
            try:
                made: Any = ends.enter_context(make()) if chosen else None
            except (NotPermitted, ImportError) as obstacle:
                print(f"skipping what needs {needed}: {obstacle}", file=sys.stderr)
            else:
                ready += [furnish(side, made) for side in chosen]
        yield ready


def _with_variables(side: Side, variables: Mapping[str, str]) -> Side:
    return dataclasses.replace(side, environment={**side.environment, **variables})


def _put_inside(side: Side, prefixes: Sequence[Sequence[str]]) -> Side:
    inside = dataclasses.replace(side, prefixes=prefixes, address=ADDRESSES[0])
    if side.api != "weft":
        return inside
    # Others could reach the addresses, as far as a worker knows: it demands a secret.
    own = [{"listen": address} for address in ADDRESSES]
    secured = _with_variables(inside, {"WEFT_SECRET": secrets.token_hex()})
    return dataclasses.replace(secured, options_by_rank=own)
