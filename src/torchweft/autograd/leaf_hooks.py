"""Hooks that a program put on the node that accumulates the gradient of a leaf.

A backward pass in a context asks for gradients and runs no such node, so these hooks have to be
called by hand. torch tells nobody whether a node has any, except by registering another one,
which takes longer than the rest that is done for a leaf. So this is off unless somebody wants it.
Hooks of tensors are another thing: torch's engine always calls them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.gradients import Sink
from torchweft.autograd.single import hooks_of

_is_enabled = False


def enable_leaf_hooks(enabled: bool = True) -> None:
    """Has passes that begin from now on call the hooks of nodes that accumulate, or not."""
    global _is_enabled
    _is_enabled = enabled


def has_leaf_hooks(node: Node) -> bool:
    """Tells whether hooks are to be called for a leaf; ``node`` accumulates its gradient."""
    return _is_enabled and bool(hooks_of(node.register_hook))


def with_leaf_hooks(sink: Sink) -> Sink:
    """Returns what adds gradients of leaves by ``sink`` and calls their hooks, if that is on."""
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
