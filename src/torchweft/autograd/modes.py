"""The modes of a backward pass: whether it keeps or records graphs, and where gradients go."""

from __future__ import annotations

from typing import NamedTuple

RETAIN_GRAPH = 1
CREATE_GRAPH = 4
FOR_INPUTS = 8
INTO_GRAD = 16
"""Flags of a frame; the codec defines further flags."""


class PassMode(NamedTuple):
    """How a pass is run, the same on all workers.

    Attributes:
        retain_graph: Whether graphs must survive for another pass.
        create_graph: Whether the pass itself is recorded, so that its gradients can be
            differentiated in turn.
        for_inputs: Whether only the gradients of certain tensors of the driver are wanted, and no
            gradients of leaves elsewhere.
        into_grad: Whether gradients are added to ``.grad`` of the leaves, on all workers. The
            context belongs to this pass alone and gets none.
    """

    retain_graph: bool = False
    create_graph: bool = False
    for_inputs: bool = False
    into_grad: bool = False

    @property
    def flags(self) -> int:
        """The flags of its frames."""
        return (
            (RETAIN_GRAPH if self.retain_graph else 0)
            | (CREATE_GRAPH if self.create_graph else 0)
            | (FOR_INPUTS if self.for_inputs else 0)
            | (INTO_GRAD if self.into_grad else 0)
        )


def mode_of(flags: int) -> PassMode:
    """Returns the mode that the flags of a frame encode."""
    return PassMode(
        bool(flags & RETAIN_GRAPH),
        bool(flags & CREATE_GRAPH),
        bool(flags & FOR_INPUTS),
        bool(flags & INTO_GRAD),
    )
