"""The measured distributed graphs, as plain data; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The order of the calls of a forward pass.

    Attributes:
        title: Title in reports.
        branches: For each call that the first worker makes, the workers it passes: the first
            calls the second, which calls the third, and so on.
        nodes: Graph nodes that each call adds on its worker, beside one for a parameter.
    """

    title: str
    branches: tuple[tuple[str, ...], ...]
    nodes: int = 1

    @property
    def size(self) -> int:
        """Size of the smallest group that can run it: idle workers would cost CPU time."""
        return 1 + len({worker for branch in self.branches for worker in branch})


CHAIN = ("worker1", "worker2", "worker3", "worker4")

SHAPES = {
    "1 hop": Shape("1 hop", (CHAIN[:1],)),
    "2 hops": Shape("2 hops, a chain", (CHAIN[:2],)),
    "4 hops": Shape("4 hops, a chain", (CHAIN,)),
    "2 calls": Shape("2 calls at once, to 2 workers", (CHAIN[:1], CHAIN[1:2])),
    "4 calls": Shape("4 calls at once, to 4 workers", tuple((worker,) for worker in CHAIN)),
    "4 calls to 1": Shape("4 calls at once, to 1 worker", (CHAIN[:1],) * 4),
    "10 nodes": Shape("1 hop, 10 graph nodes", (CHAIN[:1],), 10),
    "100 nodes": Shape("1 hop, 100 graph nodes", (CHAIN[:1],), 100),
    "1000 nodes": Shape("1 hop, 1,000 graph nodes", (CHAIN[:1],), 1000),
}
