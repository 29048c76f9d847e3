"""Parameters of this process whose values are trained elsewhere.

A model that was handed to a pipeline, or whose tables went to servers, still has its parameters
here. An optimizer of them would step what nobody trains: no gradient ever comes to them. So the
first step of each optimizer looks for such parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchweft.errors import ConfigurationError


class Moved:
    """Some parameters that are trained elsewhere, until it is closed or dropped.

    Args:
        instead: What to call instead of an optimizer of this process, for the message.
    """

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._trained: dict[int, bool] = {}
        _moved.add(self)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Adds parameters."""
        own = list(parameters)
        if own:
            self._parameters = self._parameters | {id(each): weakref.ref(each) for each in own}
            self._trained |= {id(each): each.requires_grad for each in own}
            _stepped.clear()
            _watch()

    def __contains__(self, parameter: object) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and known() is parameter

    def warn_of_changes(self, fix: str) -> None:
        """Warns once if the program has frozen parameters here, for the caller of its caller.

        Args:
            fix: What to do, for the message.
        """
        present = [
            (key, parameter.requires_grad)
            for key, known in self._parameters.items()
            if (parameter := known()) is not None
        ]
        count = sum([self._trained[key] != is_trained for key, is_trained in present])
        if count:
            self._trained |= present  # Each change is told once.
            warnings.warn(
                f"requires_grad of {count} parameters has changed here, and not where they are "
                f"trained; {fix}",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Lets optimizers step the parameters again."""
        _moved.discard(self)
        self._parameters = {}


_moved: weakref.WeakSet[Moved] = weakref.WeakSet()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers that were looked at in a step."""
_hooks: list[Any] = []
"""The hook of all optimizers, once there is one. It stays: a step must not change its hooks."""


def _watch() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, *_: Any) -> None:
    """Raises at the first step of an optimizer whose parameters are trained elsewhere."""
    present = list(_moved)
    if not present or optimizer in _stepped:
        return
    own = [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if isinstance(each, Tensor)
    ]
    for moved in present:
        there = [each for each in own if each in moved]
        if there and all(each.grad is None for each in there):
            raise ConfigurationError(
                f"this {type(optimizer).__name__} has {len(there)} parameters of this process that "
                f"are trained elsewhere, where it does not reach them; {moved.instead}"
            )
    _stepped.add(optimizer)
