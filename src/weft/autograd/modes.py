"""What a backward pass leaves behind: graphs for another one, a graph of its own, gradients."""

from __future__ import annotations

from typing import NamedTuple

RETAIN_GRAPH = 1
CREATE_GRAPH = 4
FOR_INPUTS = 8
"""Flags of a frame; the codec has others."""


class PassMode(NamedTuple):
    """How a pass is run, the same on all workers.

    Attributes:
        retain_graph: Whether graphs must survive for another pass.
        create_graph: Whether the pass itself is recorded, so that its gradients can be
            differentiated in turn.
        for_inputs: Whether only the gradients of certain tensors of the driver are wanted, and
            none of leaves elsewhere.
    """

    retain_graph: bool = False
    create_graph: bool = False
    for_inputs: bool = False

    @property
    def flags(self) -> int:
        """The flags of its frames."""
        return (
            (RETAIN_GRAPH if self.retain_graph else 0)
            | (CREATE_GRAPH if self.create_graph else 0)
            | (FOR_INPUTS if self.for_inputs else 0)
        )


def mode_of(flags: int) -> PassMode:
    """Returns the mode that the flags of a frame tell."""
    return PassMode(
        bool(flags & RETAIN_GRAPH), bool(flags & CREATE_GRAPH), bool(flags & FOR_INPUTS)
    )
