"""The gradients of one context, by tensor.

Rules of the file: a stored gradient shares no memory that other code may write to, since
optimizers and clipping work in place. A sum is made in place only if this table made the tensor
itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Final, Literal

import torch
from torch import Tensor

from torchweft.errors import AutogradError
from torchweft.threads import device_streams
from torchweft.threads.device_streams import keep, new_guard, new_order

_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _uses_of(tensor: Tensor) -> int:
    return int(_storage_use_count(tensor.untyped_storage()._cdata))  # type: ignore[misc]


# It depends on torch's version whether the storage object made for the query counts as a use.
_UNSHARED_USES = _uses_of(torch.empty(1)) if _storage_use_count else 0
# The tensor returned for a part of a sparse tensor is one more use.
_UNSHARED_USES_OF_PART = _UNSHARED_USES + 1


UNDEFINED: Final[Literal[False]] = False
"""Stands for the missing gradient of a tensor that was used: the nodes behind it run, as in
torch's engine. None stands for that of an unused tensor: nothing behind it runs."""

Gradient = Tensor | Literal[False] | None
"""The gradient of a tensor of a message, or why there is none."""


def sum_of(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients of one tensor into a new one; it is sparse only if both are."""
    if first.is_sparse and not second.is_sparse:
        return second + first
    return first + second


def is_private(gradient: Tensor) -> bool:
    """Returns whether no other tensor shares the memory and in-place operations are allowed.

    Returns False when in doubt: a needless copy is only slow.
    """
    if gradient.layout is torch.strided:
        return _is_alone(gradient, _UNSHARED_USES)
    if gradient.layout is torch.sparse_coo:
        return _is_alone(gradient._values(), _UNSHARED_USES_OF_PART) and _is_alone(
            gradient._indices(), _UNSHARED_USES_OF_PART
        )
    return False


def owned(gradient: Tensor) -> Tensor:
    """Returns a gradient in memory of its own; copies only the shared parts."""
    if gradient.requires_grad:
        return gradient.clone()  # Its graph may have kept it.
    if gradient.layout is torch.strided:
        return gradient if _is_alone(gradient, _UNSHARED_USES) else gradient.clone()
    if is_private(gradient):
        return gradient
    if gradient.layout is torch.sparse_coo:
        values = gradient._values()
        if _is_alone(values, _UNSHARED_USES_OF_PART):
            # An embedding's gradient: its indices are the input, which the program may overwrite.
            return _with_own_indices(gradient, values)
    return gradient.clone()


def _with_own_indices(gradient: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        gradient._indices().clone(),
        values,
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
        device=values.device,
    )


def _is_alone(tensor: Tensor, unshared_uses: int) -> bool:
    if _storage_use_count is None or (not tensor.is_contiguous() and 0 in tensor.stride()):
        return False
    # As in ``_uses_of``: it runs for each leaf of each pass.
    uses: int = _storage_use_count(tensor.untyped_storage()._cdata)
    return uses <= unshared_uses


def _used_elsewhere(pairs: Sequence[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> set[int]:
    """Returns the ids of gradients that are borrowed, or occur more than once."""
    used = set(map(id, borrowed))
    if len(pairs) > 1:
        ids = [id(gradient) for _, gradient in pairs]
        if len(set(ids)) < len(ids):
            used |= {each for each, count in Counter(ids).items() if count > 1}
    return used


Sink = Callable[[Iterable[tuple[Tensor, Tensor]], Iterable[Tensor]], object]
"""Adds the gradients of leaves of one engine call; other code uses those of the second argument."""


_hooks_of = attrgetter("_post_accumulate_grad_hooks")  # in C: it runs for each leaf of each pass
_NOTHING_ACCUMULATED = (
    "a leaf has hooks of register_post_accumulate_grad_hook, but a pass in an autograd context "
    "accumulates nothing in .grad, so they would never be called: remove them, or call "
    "torchweft.autograd.backward(loss) outside of contexts"
)


class Gradients:
    """Sums gradients by tensor. Thread-safe.

    Args:
        calls_hooks: Whether the caller calls the post-accumulate hooks of leaves; otherwise a leaf
            with such hooks is refused.
    """

    def __init__(self, calls_hooks: bool = True) -> None:
        self._calls_hooks = calls_hooks
        self._lock = threading.RLock()
        self._order = new_order()
        self._sums: dict[Tensor, Tensor] = {}
        self._made_here: set[Tensor] = set()

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a gradient that other code may keep using; the first is copied if necessary."""
        self.add_all([(tensor, gradient)], borrowed=())

    def add_all(self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        """Adds the gradients of one engine call.

        Args:
            pairs: Tensors and their gradients; a tensor may occur more than once.
            borrowed: Objects that are still used elsewhere. A borrowed gradient is copied, and so
                is a gradient that occurs for several tensors.
        """
        pairs = list(pairs)
        if not self._calls_hooks and any(map(_hooks_of, map(itemgetter(0), pairs))):
            raise AutogradError(_NOTHING_ACCUMULATED)
        used = _used_elsewhere(pairs, borrowed)
        with self._lock, self._order:
            if device_streams.HAS_CUDA:
                self._keep_for_sums(pairs)
            for tensor, gradient in pairs:
                previous = self._sums.get(tensor)
                if previous is None:
                    is_used = id(gradient) in used
                    self._sums[tensor] = gradient.clone() if is_used else owned(gradient)
                elif tensor in self._made_here and not previous.is_sparse:
                    previous += gradient
                else:
                    self._sums[tensor] = sum_of(previous, gradient)
                    self._made_here.add(tensor)

    @property
    def has_any(self) -> bool:
        """Whether there is a gradient."""
        return bool(self._sums)

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has a gradient."""
        return tensor in self._sums

    def snapshot(self) -> dict[Tensor, Tensor]:
        """Returns the sums so far; later additions do not change the returned tensors."""
        with self._lock, self._order:
            self._made_here.clear()
            if device_streams.HAS_CUDA:
                keep(self._sums)
            return dict(self._sums)

    def _keep_for_sums(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Keeps the memory of all parts of sums until this thread has added them."""
        for tensor, gradient in pairs:
            keep(gradient, self._sums.get(tensor))

    def keep(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Adds gradients without copying; other code may read but must not write them."""
        with self._lock, self._order:
            if device_streams.HAS_CUDA:
                self._keep_for_sums(gradients.items())
            for tensor, gradient in gradients.items():
                previous = self._sums.get(tensor)
                self._sums[tensor] = gradient if previous is None else sum_of(previous, gradient)
            self._made_here.difference_update(gradients)

    def put(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Replaces the sums of some tensors by gradients that no other code writes to."""
        with self._lock, self._order:
            self._sums.update(gradients)
            self._made_here.difference_update(gradients)

    def clear(self) -> None:
        """Removes all sums."""
        with self._lock, self._order:
            self._sums.clear()
            self._made_here.clear()


_accumulating = new_guard()
"""Held while adding to ``.grad``: concurrent passes may add to the same tensors."""


def add_to_grad(
    pairs: Iterable[tuple[Tensor, Tensor]],
    borrowed: Iterable[Tensor],
    create_graph: bool = False,
) -> None:
    """Adds gradients to ``.grad`` of leaves, and calls their post-accumulate hooks.

    Args:
        pairs: Leaves and their gradients; a leaf may occur more than once.
        borrowed: Objects that are still used elsewhere; see ``Gradients.add_all``.
        create_graph: Whether the gradients have a graph that ``.grad`` must keep.
    """
    pairs = list(pairs)
    used = _used_elsewhere(pairs, borrowed)
    with torch.set_grad_enabled(create_graph):
        with _accumulating.lock, _accumulating.order:
            if device_streams.HAS_CUDA:
                keep(pairs, [tensor.grad for tensor, _ in pairs])
            for tensor, gradient in pairs:
                previous = tensor.grad
                if previous is None:
                    is_used = id(gradient) in used
                    tensor.grad = gradient.clone() if is_used else owned(gradient)
                elif create_graph or previous.is_sparse:
                    tensor.grad = sum_of(previous, gradient)
                else:
                    previous += gradient
        for tensor in dict.fromkeys([tensor for tensor, _ in pairs]):
            # Only once ``.grad`` is complete: optimizers that step in backward rely on that.
            for hook in tuple((tensor._post_accumulate_grad_hooks or {}).values()):
                hook(tensor)
