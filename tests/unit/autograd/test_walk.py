"""Tests walks: reached nodes, and components of sends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchweft.autograd.contexts import Context
from torchweft.autograd.walk import Live, Reached, SentGraph


def edges(*tensors: Tensor) -> tuple[GradientEdge, ...]:
    """Returns the gradient edges of tensors."""
    return tuple(get_gradient_edge(tensor) for tensor in tensors)


def received(context: Context, message_id: int) -> Tensor:
    """Returns a tensor that was received in a message."""
    return context.record_receive(message_id, 1, [torch.ones(2)], [1])[0]


def numbers_of(components: dict[int, Reached]) -> list[list[int]]:
    """Returns for each send the numbers of the sends of its component."""
    return [[send.message_id for send in reached.sends] for reached in components.values()]


def test_a_receive_is_reported_by_the_first_walk_that_reaches_it() -> None:
    context = Context(1, 0)
    first, second = received(context, 11), received(context, 12)
    graph = SentGraph(context.receive_of)
    numbers = [
        [record.message_id for record in graph.add(Live(*send)).receives.values()]
        for send in ((1, edges(first * 2)), (2, edges(first + second)))
    ]
    assert numbers == [[11], [12]]


def test_sends_hang_together_through_nodes_and_placeholders_but_not_leaves() -> None:
    context = Context(1, 0)
    weight, value = torch.ones(2, requires_grad=True), received(context, 11)
    shared = weight.exp()
    graph = SentGraph(context.receive_of)
    tensors = (shared * 2, weight * 3, shared * 4, value * weight, value * 5, weight)
    for number, tensor in enumerate(tensors):
        graph.add(Live(number, edges(tensor)))
    components = graph.components()
    assert numbers_of(components) == [[0, 2], [1], [0, 2], [3, 4], [3, 4], [5]]
    assert components[0] is components[2]
    assert all(list(reached.leaves.values()) == [weight] for reached in components.values())


def test_a_leaf_with_hooks_holds_sends_together() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: gradient)
    graph = SentGraph({})
    for factor in (2, 3):
        graph.add(Live(factor, edges(weight * factor)))
    assert numbers_of(graph.components()) == [[2, 3], [2, 3]]
