"""Provides the names of ``torch.distributed.autograd``, implemented by Weft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import torchweft.autograd
from torchweft.autograd import get_gradients, is_available
from torchweft.errors import AutogradError
from torchweft.extending import is_worker, this_worker
from torchweft.ids import WORKER_SHIFT, scoped_id
from torchweft.rpc import torch_names

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


class context(torchweft.autograd.context):
    """A ``torchweft.autograd.context`` that, like PyTorch's, does not nest."""

    def __enter__(self) -> int:
        outer = torch_names.current_id()
        if outer:
            raise AutogradError(
                f"Already have an autograd context id for this thread: {outer}; leave the `with "
                "context()` block before the next one, or use torchweft.autograd.context, which "
                "nests"
            )
        return super().__enter__()


def backward(contextId: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Does what ``torchweft.autograd.backward`` does, but refuses leaves as roots.

    Args:
        contextId: The context in which the roots were computed. Programs may pass it by this name.
        roots: Scalar tensors of this worker that require grad.
        retain_graph: Whether to keep the graphs for another pass over the same context.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: A tensor cannot be a root, or the pass failed.
    """
    if isinstance(roots, (list, tuple)):
        for place, root in enumerate(roots):
            is_leaf = isinstance(root, Tensor) and root.is_leaf
            if is_leaf and root.requires_grad and root.numel() == 1:  # otherwise a valid root
                raise AutogradError(
                    f"root {place} does not have a valid gradient function: it is a leaf, "
                    "there is nothing to go back through"
                )
    torchweft.autograd.backward(contextId, roots, retain_graph)


def _init(worker_id: int) -> None:
    """Refuses another number than that of this worker, which has autograd by itself."""
    if is_worker() and this_worker().id != worker_id:
        raise AutogradError(
            f"autograd is already initialized, as that of worker {this_worker().id}"
        )


def _get_debug_info() -> dict[str, str]:
    """Returns the numbers of this worker's running backward passes and live contexts."""
    return torch_names.debug_info().autograd


# Contexts by hand, as programs with an optimizer or a context manager of their own use them


class DistAutogradContext:
    """This worker's part of a context. Libraries import the name for their annotations.

    Args:
        context: The context itself.
    """

    def __init__(self, context: torch_names.Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        """Returns the number of the context."""
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        """Returns the ranks of the workers with which this worker exchanged its messages."""
        return set(self._context.known_workers)


_opened: dict[int, context] = {}
"""The contexts opened by hand: one that nothing holds is released."""


def _new_context() -> DistAutogradContext:
    """Opens a context and makes it that of this thread, until ``_release_context``."""
    made = context()
    number = made.__enter__()
    _opened[number] = made
    return _retrieve_context(number)


def _release_context(context_id: int) -> None:
    """Ends a context that is alive here, on all workers that know it.

    Raises:
        AutogradError: The context is not alive here.
    """
    torch_names.release_context(context_id)
    _opened.pop(context_id, None)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Returns a context that is alive here.

    Raises:
        AutogradError: The context is not alive here.
    """
    return DistAutogradContext(torch_names.find_context(context_id))


def _is_valid_context(context_id: int) -> None:
    """Raises AutogradError unless the context is alive here."""
    _retrieve_context(context_id)


def _current_context() -> DistAutogradContext:
    """Returns the context of this thread.

    Raises:
        AutogradError: The thread has no context.
    """
    context_id = torch_names.current_id()
    if not context_id:
        raise AutogradError("Current thread doesn't have a valid autograd context")
    return _retrieve_context(context_id)


def _get_max_id() -> int:
    """Returns the highest number that a context of this worker may have."""
    return scoped_id(this_worker().id, (1 << WORKER_SHIFT) - 1)
