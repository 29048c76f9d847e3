"""Versions of one stage's weights: those that minibatches under way began with, and the newest.

A minibatch under way has a graph, which autograd needs unchanged until its backward, and the
optimizer steps before that. Copies for each minibatch would hold one set of weights too many. So
graphs are made of *leaves* that share the memory of the weights. The weights move to new memory
when the optimizer is about to change memory that is still needed, and only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchweft.pipeline.stage_run import Leaves


class WeightVersions:
    """Keeps the versions of a stage's weights that minibatches use. One thread uses it.

    A version is the number of updates that it contains. The newest is the module itself; weights
    that require no grad, and buffers, have no versions.

    Args:
        module: The stage's module. Its weights keep their identity, which optimizers need, but may
            get other memory in an update.
    """

    def __init__(self, module: nn.Module) -> None:
        self.newest = 0
        self.peak = 1
        self._own = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._users: dict[int, int] = {}
        self._wanted = 0.0

    def begin(self, minibatch: int, version: int) -> Leaves:
        """Returns the leaves with which the module runs a minibatch, by name.

        Args:
            minibatch: The minibatch; it uses the version until its ``end``.
            version: The newest, or one that ``want`` asked to keep.
        """
        self._users[minibatch] = version
        return self._leaves_of(version)

    def end(self, minibatch: int) -> None:
        """Adds the gradients of a minibatch's backward to those of the module's own weights."""
        leaves = self._leaves[self._users.pop(minibatch)]
        for name, weight in self._own.items():
            found, leaves[name].grad = leaves[name].grad, None
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found
                hooks: Any = weight
                for hook in list((hooks._post_accumulate_grad_hooks or {}).values()):
                    hook(weight)
        self._release()

    def want(self, version: float) -> None:
        """Says that later minibatches use no version before this one; infinity: none at all."""
        self._wanted = version
        self._release()

    def update(self, step: Callable[[], object]) -> None:
        """Makes the next version.

        Args:
            step: Changes the module's weights in place, as an optimizer's ``step`` does.
        """
        if self._is_needed(self.newest):
            self._leaves_of(self.newest)
            for weight in self._own.values():
                weight.data = weight.data.clone()
        else:
            self._leaves.pop(self.newest, None)
        step()
        self.newest += 1
        for weight in self._own.values():
            weight.grad = None
        self.peak = max(self.peak, len(self._leaves) + 1)

    def _leaves_of(self, version: int) -> dict[str, Tensor]:
        if version not in self._leaves:
            assert version == self.newest, f"version {version} is gone; {self.newest} is the newest"
            # ``data`` shares the memory, and counts changes by itself: a step after the move to
            # new memory is no change of the leaf.
            self._leaves[version] = {name: _leaf_of(weight) for name, weight in self._own.items()}
        return self._leaves[version]

    def _is_needed(self, version: int) -> bool:
        return version >= self._wanted or version in self._users.values()

    def _release(self) -> None:
        for version in [each for each in self._leaves if not self._is_needed(each)]:
            del self._leaves[version]


def _leaf_of(weight: Tensor) -> Tensor:
    """Returns a leaf with the memory of a weight, and its hooks on the gradient."""
    leaf = weight.data.requires_grad_()
    hooked: Any = weight
    if hooked._backward_hooks:
        setattr(leaf, "_backward_hooks", hooked._backward_hooks)  # noqa: B010
    return leaf
