"""The hooks of a program that torch's engine does not call, or not at the right time, in a pass.

*Hooks of nodes of leaves and of received tensors.* A pass asks torch's engine for the gradients
there, and the engine runs no node there. So Weft must call the hooks that a program has registered
at such a node. Hooks of tensors differ: the engine always calls them. torch reveals a node's hooks
only when another hook is registered, which takes longer than all other work for a leaf. But all
nodes register hooks by one function of Python. It is replaced here by one that notes when the
program registers a hook at any node. Until then nothing is looked for. All hooks count as hooks of
nodes that were registered before this module was imported.

*Hooks of several tensors* (``torch.autograd.graph.register_multi_grad_hook``). torch's hook counts
the gradients of one run of its engine, and asks that run how many will come. A pass of Weft makes
several runs: each side of a call is one, and so are parts of the graph that share no node. So a
hook would be called for each run, with None for the tensors of the others. Therefore torch's
function is replaced by one that has it register its hooks, and puts another function in front of
each of them. In a pass, this function hands the gradient to the pass, which calls the program's
hook once all gradients are there: those of all tensors, or, once the pass has no more to run on
this worker, those that have come. Elsewhere it calls torch's hook. torch hands its thread-local
objects on to the threads of its engine. The pass is one of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchweft.autograd.contexts import Sink, edges_behind, gates_of
from torchweft.errors import AutogradError

# Replacing functions of torch


def replace(function: Callable[..., Any], replacement: Callable[..., Any], name: str) -> None:
    """Has all modules that know a function by its public name call another one in its place.

    Args:
        function: The function.
        replacement: The other one.
        name: The public name. Code that calls the function by other names is left as it is.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is function:
            names[name] = replacement


# Nodes

Hook = Callable[..., Any]

_owner: Any = torch.autograd.function._HookMixin
_register: Callable[[Any, Hook], Any] = _owner._register_hook
has_node_hooks = RemovableHandle.next_id > 0
"""Whether the program may have registered hooks at nodes; else there is nothing to look for."""


def _register_and_note(hooks: Any, hook: Hook) -> Any:
    global has_node_hooks
    if not _is_own(hook):
        has_node_hooks = True
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


def are_at_leaf(node: Node) -> bool:
    """Returns whether the program has hooks at ``node``, which accumulates a leaf's gradient."""
    return bool(_hooks_of(node.register_hook) or _hooks_of(node.register_prehook))


def with_leaf_hooks(sink: Sink, create_graph: bool) -> Sink:
    """Returns ``sink``, extended by calling the hooks of accumulating nodes.

    Args:
        sink: Takes the gradients of leaves.
        create_graph: Whether the pass is recorded.
    """

    def add_and_call(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[object]) -> None:
        placed = list(pairs)
        nodes = [edge.node for edge in edges_behind(gates_of([leaf for leaf, _ in placed]))]
        with torch.set_grad_enabled(create_graph):
            added = [
                (leaf, _after_prehooks(node, gradient))
                for node, (leaf, gradient) in zip(nodes, placed, strict=True)
            ]
            sink(added, borrowed)
            for node, (_, gradient) in zip(nodes, added, strict=True):
                for hook in _hooks_of(node.register_hook):
                    hook((), (gradient,))

    return add_and_call


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
    if _hooks_of(node.register_hook):
        raise AutogradError(
            "grad_fn.register_hook was called for a tensor that came from another worker, where "
            "its node runs: register the hook there, or use tensor.register_hook or "
            "grad_fn.register_prehook, which see the gradient of the tensor"
        )
    with torch.set_grad_enabled(create_graph):
        return _after_prehooks(node, gradient)


# Several tensors

_native: Any = torch._C
_KEY = "torchweft pass"
_register_multi: Callable[..., Any] = graph.register_multi_grad_hook
has_hooks_of_several = False
"""Whether the program has registered a hook of several tensors in this process."""


@dataclass(eq=False)
class _Hook:
    """A function that the program registered for the gradients of several tensors."""

    function: Callable[[Any], object]
    nodes: Sequence[Node]
    mode: str


class Gathering:
    """The gradients for such hooks in one pass. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[_Hook, dict[int, Tensor]] = {}
        self._called: set[_Hook] = set()

    def take(self, hook: _Hook, place: int, gradient: Tensor) -> None:
        """Takes the gradient of a tensor; calls the hook if it has waited for no other one."""
        with self._lock:
            found = self._found.setdefault(hook, {})
            found[place] = gradient
            if hook in self._called or (hook.mode == "all" and len(found) < len(hook.nodes)):
                return
            self._called.add(hook)
        hook.function(gradient if hook.mode == "any" else _in_order(hook, found))

    @property
    def is_waiting(self) -> bool:
        """Whether some hook waits for further gradients."""
        return len(self._called) < len(self._found)

    def finish(self, may_run: Callable[[Node], bool]) -> None:
        """Calls the hooks that wait only for gradients which do not come.

        Args:
            may_run: Whether there may still be a gradient at a node.
        """
        with self._lock:
            waiting = [each for each in self._found if each not in self._called]
            done = [each for each in waiting if not any(map(may_run, self._missing(each)))]
            self._called.update(done)
        for hook in done:
            hook.function(_in_order(hook, self._found[hook]))

    def _missing(self, hook: _Hook) -> list[Node]:
        found = self._found[hook]
        return [node for place, node in enumerate(hook.nodes) if place not in found]


def _in_order(hook: _Hook, found: dict[int, Tensor]) -> list[Tensor | None]:
    return [found.get(place) for place in range(len(hook.nodes))]


@wraps(_register_multi)
def _register_for_passes(
    tensors: Sequence[Tensor], fn: Callable[[Any], object], *, mode: Any = "all"
) -> Any:
    global has_hooks_of_several
    handles = _register_multi(tensors, fn, mode=mode)
    has_hooks_of_several = True
    nodes = [graph.get_gradient_edge(each).node for each in tensors if each.requires_grad]
    hook = _Hook(fn, nodes, mode)
    for place, handle in enumerate(handles.handles):
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = partial(_take, hook, place, hooks[handle.id])
    return handles


def _take(hook: _Hook, place: int, of_torch: Callable[[Tensor], None], gradient: Tensor) -> None:
    gathering = _current()
    if gathering is None:
        of_torch(gradient)
    else:
        gathering.take(hook, place, gradient)


replace(_register_multi, _register_for_passes, "register_multi_grad_hook")


def _current() -> Gathering | None:
    found: Gathering | None = (
        _native._get_obj_in_tls(_KEY) if _native._is_key_in_tls(_KEY) else None
    )
    return found


@contextlib.contextmanager
def gathered_by(gathering: Gathering | None) -> Iterator[None]:
    """Has a pass take the gradients within a ``with`` block; None for torch's own passes."""
    before = _current()
    _native._stash_obj_in_tls(_KEY, gathering)
    try:
        yield
    finally:
        _native._stash_obj_in_tls(_KEY, before)
