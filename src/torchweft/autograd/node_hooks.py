"""Calls hooks of nodes that a pass does not run: nodes of leaves and of received tensors.

A pass asks torch's engine for the gradients at leaves and at received tensors, and the engine runs
no node there. So Weft must call the hooks that a program has registered at such a node. Hooks of
tensors differ: the engine always calls them.

The problem: torch reveals a node's hooks only when another hook is registered, which takes longer
than all other work for a leaf. The idea: all nodes register hooks by one function of Python. It is
replaced here by one that notes when the program registers a hook at any node. Until then nothing is
looked for. All hooks count as hooks of nodes that were registered before this module was imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchweft.autograd.gradients import Sink
from torchweft.errors import AutogradError

Hook = Callable[..., Any]

_owner: Any = torch.autograd.function._HookMixin
_register: Callable[[Any, Hook], Any] = _owner._register_hook
_has_any = RemovableHandle.next_id > 0


def _register_and_note(hooks: Any, hook: Hook) -> Any:
    global _has_any
    if not _is_own(hook):
        _has_any = True
    return _register(hooks, hook)


def _is_own(hook: Any) -> bool:
    """Returns whether Weft has registered a hook itself."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith("torchweft.")


_owner._register_hook = staticmethod(_register_and_note)


def _hooks_of(register: Callable[[Hook], Any]) -> list[Hook]:
    """Returns the program's hooks that were added by ``register``, a method of a node, in order."""
    # torch gives access to the hooks of a node only through a new handle.
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return [hook for hook in hooks.values() if not _is_own(hook)] if hooks else []


def _nothing(*_: Any) -> None:
    """A hook without effect."""


def _after_prehooks(node: Node, gradient: Tensor) -> Tensor:
    """Returns a gradient as the hooks leave it that see it before the node."""
    for hook in _hooks_of(node.register_prehook):
        changed = hook((gradient,))
        if changed is not None:
            gradient = changed if isinstance(changed, Tensor) else changed[0]
    return gradient


# Leaves


def has_leaf_hooks(node: Node) -> bool:
    """Returns whether to call hooks of ``node``, which accumulates the gradient of a leaf."""
    return _has_any and bool(_hooks_of(node.register_hook) or _hooks_of(node.register_prehook))


def with_leaf_hooks(
    sink: Sink, nodes_of_leaves: Callable[[], Mapping[int, Node]], create_graph: bool
) -> Sink:
    """Returns ``sink``, extended by calling the hooks of accumulating nodes if there are any.

    Args:
        sink: Takes the gradients of leaves.
        nodes_of_leaves: Returns known accumulating nodes, by the ``id`` of their leaf.
        create_graph: Whether the pass is recorded.
    """
    if not _has_any:
        return sink

    def add_and_call(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        nodes = nodes_of_leaves()
        placed = [
            (nodes.get(id(leaf)) or _accumulating(leaf), leaf, gradient) for leaf, gradient in pairs
        ]
        with torch.set_grad_enabled(create_graph):
            added = [(leaf, _after_prehooks(node, gradient)) for node, leaf, gradient in placed]
            sink(added, borrowed)
            for (node, _, _), (_, gradient) in zip(placed, added, strict=True):
                for hook in _hooks_of(node.register_hook):
                    hook((), (gradient,))

    return add_and_call


class _Use(torch.autograd.Function):
    """Uses a tensor of any layout, without memory or work."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return torch.empty(0)


_use: Callable[[Tensor], Tensor] = _Use.apply


def _accumulating(leaf: Tensor) -> Node:
    """Returns the node that accumulates the gradient of a leaf, of any layout."""
    with torch.enable_grad():
        made = leaf.view_as(leaf) if leaf.layout is torch.strided else _use(leaf)
    assert made.grad_fn is not None
    node = made.grad_fn.next_functions[0][0]
    assert node is not None
    return node


# Received tensors


def at_received(node: Node, gradient: Tensor, create_graph: bool) -> Tensor:
    """Returns the gradient of a received tensor as the hooks of its node leave it.

    Args:
        node: The node of the received tensor.
        gradient: The complete gradient there.
        create_graph: Whether the pass is recorded.

    Raises:
        AutogradError: There are hooks that see what the node has computed, which is elsewhere.
    """
    if not _has_any:
        return gradient
    if _hooks_of(node.register_hook):
        raise AutogradError(
            "grad_fn.register_hook was called for a tensor that came from another worker, where "
            "its node runs: register the hook there, or use tensor.register_hook or "
            "grad_fn.register_prehook, which see the gradient of the tensor"
        )
    with torch.set_grad_enabled(create_graph):
        return _after_prehooks(node, gradient)
