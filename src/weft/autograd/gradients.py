"""The gradients of one context: which tensor got what so far.

Rules of the file: a stored gradient shares memory with nothing that others may write to, since
optimizers and clipping work in place; and a sum is made in place only where this table made the
tensor itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_storage_use_count = getattr(torch._C, "_storage_Use_Count", None)
# One use by the tensor, one by the storage object that was made to ask.
_UNSHARED_USES = 2


def sum_of(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients of one tensor into a new one; it is sparse only if both are."""
    if first.is_sparse and not second.is_sparse:
        return second + first
    return first + second


def is_private(gradient: Tensor) -> bool:
    """Tells whether no other tensor shares the memory, and in-place operations are allowed on it.

    Says no when in doubt: a needless copy is only slow.
    """
    if _storage_use_count is None or gradient.layout is not torch.strided:
        return False
    if not gradient.is_contiguous() and 0 in gradient.stride():
        return False
    return bool(_storage_use_count(gradient.untyped_storage()._cdata) <= _UNSHARED_USES)


class Gradients:
    """Sums up gradients by tensor; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Tensor, Tensor] = {}
        self._made_here: set[Tensor] = set()

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a gradient that others may keep using; the first one is copied if need be."""
        self.add_all([(tensor, gradient)], borrowed=())

    def add_all(self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        """Adds the gradients of one engine call.

        Args:
            pairs: Tensors and their gradients; a tensor may occur more than once.
            borrowed: Objects that are still used elsewhere; among the gradients, they are copied.
        """
        used = {id(gradient) for gradient in borrowed}
        owned = []
        for tensor, gradient in pairs:
            is_shared = id(gradient) in used or not is_private(gradient)
            used.add(id(gradient))
            owned.append((tensor, gradient, is_shared))
        with self._lock:
            for tensor, gradient, is_shared in owned:
                self._add(tensor, gradient, is_shared)

    def _add(self, tensor: Tensor, gradient: Tensor, is_shared: bool) -> None:
        previous = self._sums.get(tensor)
        if previous is None:
            self._sums[tensor] = gradient.clone() if is_shared else gradient
        elif tensor in self._made_here and not previous.is_sparse:
            previous += gradient
        else:
            self._sums[tensor] = sum_of(previous, gradient)
            self._made_here.add(tensor)

    def snapshot(self) -> dict[Tensor, Tensor]:
        """Returns the sums so far; what is added later does not change the tensors returned."""
        with self._lock:
            self._made_here.clear()
            return dict(self._sums)

    def put(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Replaces the sums of some tensors by gradients that nobody else writes to."""
        with self._lock:
            self._sums.update(gradients)
            self._made_here.difference_update(gradients)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._sums.clear()
            self._made_here.clear()
