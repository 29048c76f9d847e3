"""Tests where passes start, and components of sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tests.tables import cases
from torchweft.autograd.contexts import Context, SendRecord
from torchweft.autograd.graph import Reached, SentGraph, roots_of
from torchweft.errors import ArgumentTypeError, AutogradError


def edges(*tensors: Tensor) -> tuple[GradientEdge, ...]:
    """Returns the gradient edges of tensors."""
    return tuple(get_gradient_edge(tensor) for tensor in tensors)


def live(message_id: int, *edges: GradientEdge) -> SendRecord:
    """Returns the record of a message whose gradients go to edges."""
    return SendRecord(message_id, 1, (), (), edges=edges)


def received(context: Context, message_id: int) -> Tensor:
    """Returns a tensor that was received in a message."""
    return context.record_receive(message_id, 1, [torch.ones(2)], [1])[0]


def numbers_of(components: dict[int, Reached]) -> list[list[int]]:
    """Returns for each send the numbers of the sends of its component."""
    return [[send.message_id for send in reached.sends] for reached in components.values()]


def test_sends_hang_together_through_nodes_and_placeholders_but_not_leaves() -> None:
    context = Context(1, 0)
    weight, value = torch.ones(2, requires_grad=True), received(context, 11)
    shared = weight.exp()
    graph = SentGraph(context.receive_of.get)
    tensors = (shared * 2, weight * 3, shared * 4, value * weight, value * 5, weight)
    for number, tensor in enumerate(tensors):
        graph.add(live(number, *edges(tensor)))
    components = graph.components()
    assert numbers_of(components) == [[0, 2], [1], [0, 2], [3, 4], [3, 4], [5]]
    assert components[0] is components[2]
    assert all(list(reached.leaves.values()) == [weight] for reached in components.values())


# Roots

SCALAR = torch.tensor(2.0, requires_grad=True) * 3
ROW = torch.ones(2, requires_grad=True) * 3


@cases(
    ("tensors", "gradients", "error", "text"),
    [
        ([], None, AutogradError, "at least one root"),
        (3, None, ArgumentTypeError, r"a list of tensors, not an int; for one tensor pass"),
        ([SCALAR, 3], None, ArgumentTypeError, "root 1 is an int"),
        ([SCALAR.detach()], None, AutogradError, "root 0 does not require grad"),
        ([ROW], None, AutogradError, r"root 0 has shape \(2,\).*or pass the gradient there"),
        ([SCALAR], [], AutogradError, "0 gradients for 1 root"),
        ([SCALAR], [2.0], ArgumentTypeError, "gradient for root 0 is a float"),
        ([ROW], [torch.ones(3)], AutogradError, r"root 0 has shape \(3,\); the root has \(2,\)"),
        ([ROW], [torch.ones(2, dtype=torch.cfloat)], AutogradError, "torch.complex64; the root"),
    ],
)
def test_what_cannot_be_a_root_is_told(
    tensors: Any, gradients: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        roots_of(tensors, gradients)
