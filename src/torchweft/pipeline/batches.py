"""Looks at training batches for tensors that a pipeline would silently treat in another way.

No gradient goes back to the driver, so a tensor that requires grad is refused. And whether a
tensor with as many rows as the batch has one for each sample cannot be seen. But a mask or a table
is usually the same object in each step, while the samples change.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from torchweft.errors import ConfigurationError
from torchweft.pipeline.values import describe, unmarked


def check_untrained(batch: Any, name: str) -> None:
    """Looks at one batch or target.

    Args:
        batch: The batch.
        name: What it is, in messages.

    Raises:
        ConfigurationError: A tensor requires grad, or belongs to a module.
    """
    for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
        value = unmarked(leaf)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} requires grad, and no gradient comes back from the "
                "stages: pass tensor.detach(), or make what computes it a part of the first stage"
            )
        if isinstance(leaf, nn.Buffer):
            raise ConfigurationError(
                f"{name}{_pytree.keystr(path)} is a buffer of a module: make the module a part of "
                "the stage that uses it, or pass torchweft.pipeline.broadcast(buffer)"
            )


class TrainingBatches:
    """The batches of a pipeline, or its targets, one after the other.

    Args:
        name: What they are, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._earlier: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._has_warned = False

    def warn_of_same(self, batch: Any) -> None:
        """Warns once of a tensor that was the same in the step before, beside one that was not."""
        if self._has_warned:
            return
        tensors = {
            _pytree.keystr(path): leaf
            for path, leaf in _pytree.tree_flatten_with_path(batch)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        earlier = self._earlier
        self._earlier = {path: (weakref.ref(each), each._version) for path, each in tensors.items()}
        same = [path for path, each in tensors.items() if _is_same(earlier.get(path), each)]
        if not same or len(same) == len(tensors) or earlier.keys() != tensors.keys():
            return
        self._has_warned = True
        path = same[0]
        warnings.warn(
            f"{self._name}{path}, {describe(tensors[path])}, is the same tensor as in the step "
            "before, and was cut into micro-batches like the others. If its rows are not those of "
            "samples, mark it: torchweft.pipeline.broadcast(tensor). If they are, pass a copy",
            RuntimeWarning,
            stacklevel=3,  # Outside of Pipe.step.
        )


def _is_same(earlier: tuple[weakref.ref[Tensor], int] | None, tensor: Tensor) -> bool:
    if earlier is None:
        return False
    known, version = earlier
    return known() is tensor and version == tensor._version
