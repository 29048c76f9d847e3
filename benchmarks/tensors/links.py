"""The links between caller and callee that are compared, and the sides of each."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

from benchmarks.frame import Question, Side
from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import Cores
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
SIDES = (
    Side("torch", api="torch"),
    Side("weft", api="weft"),
    Side("copy", runner="alone"),
    Side("unix socket", runner="raw"),
    Side("torch tcp", api="torch", environment=LOOPBACK, options=TORCH_TCP),
    Side("weft tcp", api="weft", environment={**WEFT_TCP, **LOOPBACK}),
    Side("tcp socket", runner="raw", environment=LOOPBACK),
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
    """Makes namespaces if a side needs them; skips those sides if that is not permitted."""
    names = {side.name for side in NAMESPACES_SIDES}
    elsewhere = [side for side in sides if side.name not in names]
    inside = [side for side in sides if side.name in names]
    with contextlib.ExitStack() as ends:
        if inside:
            try:
                prefixes = ends.enter_context(two_namespaces())
            except NotPermitted as obstacle:
                print(f"skipping what runs in network namespaces: {obstacle}", file=sys.stderr)
                inside = []
            else:
                inside = [_put_inside(side, prefixes) for side in inside]
        yield [*elsewhere, *inside]


def _put_inside(side: Side, prefixes: Sequence[Sequence[str]]) -> Side:
    own = [{"listen": address} for address in ADDRESSES] if side.api == "weft" else ()
    return dataclasses.replace(side, prefixes=prefixes, address=ADDRESSES[0], options_by_rank=own)
