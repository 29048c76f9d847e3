"""``torch.autograd.graph.register_multi_grad_hook`` across the runs of one pass.

torch's hook counts the gradients of one run of its engine, and asks that run how many will come. A
pass of Weft makes several runs: each side of a call is one, and so are parts of the graph that
share no node. So a hook would be called for each run, with None for the tensors of the others.

The idea: torch's function is replaced by one that has it register its hooks, and puts another
function in front of each of them. In a pass, this function hands the gradient to the pass, which
calls the program's hook once all gradients are there: those of all tensors, or, once the pass has
no more to run on this worker, those that have come. Elsewhere it calls torch's hook.

torch hands its thread-local objects on to the threads of its engine. The pass is one of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import Node

from torchweft.autograd.replacing import replace

_native: Any = torch._C
_KEY = "torchweft pass"
_register: Callable[..., Any] = graph.register_multi_grad_hook
_is_any_registered = False


class _Hook:
    """A function that the program registered for the gradients of several tensors."""

    def __init__(self, function: Callable[[Any], object], nodes: Sequence[Node], mode: str) -> None:
        self.function = function
        self.nodes = nodes
        self.mode = mode


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


@wraps(_register)
def _register_for_passes(
    tensors: Sequence[Tensor], fn: Callable[[Any], object], *, mode: Any = "all"
) -> Any:
    global _is_any_registered
    handles = _register(tensors, fn, mode=mode)
    _is_any_registered = True
    own = handles.handles
    nodes = [graph.get_gradient_edge(each).node for each in tensors if each.requires_grad]
    hook = _Hook(fn, nodes, mode)
    for place, handle in enumerate(own):
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = partial(_take, hook, place, hooks[handle.id])
    return handles


def _take(hook: _Hook, place: int, of_torch: Callable[[Tensor], None], gradient: Tensor) -> None:
    gathering = _current()
    if gathering is None:
        of_torch(gradient)
    else:
        gathering.take(hook, place, gradient)


replace(_register, _register_for_passes, "register_multi_grad_hook")


def are_registered() -> bool:
    """Returns whether the program has registered such a hook in this process."""
    return _is_any_registered


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
