"""Calls hooks that a program put on the node that accumulates the gradient of a leaf.

A backward pass in a context asks for gradients and runs no such node, so Weft must call these
hooks. torch reveals a node's hooks only when another hook is registered, which takes longer than
all other work for a leaf. So this is off by default. Hooks of tensors differ: torch's engine
always calls them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.gradients import Sink
from torchweft.autograd.run_node import hooks_of

_is_enabled = False


def enable_leaf_hooks(enabled: bool = True) -> None:
    """Sets whether passes that begin later call the hooks of accumulating nodes."""
    global _is_enabled
    _is_enabled = enabled


def has_leaf_hooks(node: Node) -> bool:
    """Returns whether to call hooks of ``node``, which accumulates the gradient of a leaf."""
    return _is_enabled and bool(hooks_of(node.register_hook))


def with_leaf_hooks(sink: Sink) -> Sink:
    """Returns ``sink``, extended by calling the hooks of accumulating nodes if enabled."""
    if not _is_enabled:
        return sink

    def add_and_call(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        pairs = list(pairs)
        sink(pairs, borrowed)
        with torch.no_grad():
            for leaf, gradient in pairs:
                for hook in hooks_of(_accumulating(leaf).register_hook):
                    hook((), (gradient,))

    return add_and_call


def _accumulating(leaf: Tensor) -> Node:
    """Returns the node that accumulates the gradient of a leaf, of any layout."""
    with torch.enable_grad():
        made = leaf.view_as(leaf) if leaf.layout is torch.strided else leaf.unsqueeze(0)
    assert made.grad_fn is not None
    node = made.grad_fn.next_functions[0][0]
    assert node is not None
    return node
