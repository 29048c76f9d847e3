"""Parameters of this process whose values are trained elsewhere.

A model that was handed to a pipeline, or whose tables went to servers, still has its parameters
here. An optimizer of them would step what nobody trains: no gradient ever comes to them, and
``clip_grad_norm_`` would measure nothing. So steps and functions that clip look for them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from torchweft.autograd.refusals import add_check
from torchweft.errors import ConfigurationError

Known = dict[int, weakref.ref[Tensor]]
"""Tensors by their ids."""


def _known(tensors: Iterable[Tensor]) -> Known:
    return {id(each): weakref.ref(each) for each in tensors}


def _is_in(known: Known, tensor: object) -> bool:
    found = known.get(id(tensor))
    return found is not None and found() is tensor


class Moved:
    """Some parameters that are trained elsewhere, until it is closed or dropped.

    Args:
        instead: What to call instead of optimizers and functions of this process, for the message.
    """

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self._parameters: Known = {}
        self._trained: dict[int, bool] = {}
        self._beside: Known = {}
        _moved.add(self)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Adds parameters."""
        own = list(parameters)
        if own:
            self._parameters = self._parameters | _known(own)
            self._trained |= {id(each): each.requires_grad for each in own}
            add_check(_check)

    def add_beside(self, parameters: Iterable[Tensor]) -> None:
        """Adds parameters that are trained here, but clipped together with those elsewhere."""
        self._beside = _known(parameters)

    def warn_of_rest(self, name: str, parameters: Iterable[Tensor]) -> None:
        """Warns once if parameters beside those elsewhere are clipped alone."""
        if any(_is_in(self._beside, each) for each in parameters):
            self._beside = {}
            warnings.warn(
                f"{name} leaves out gradients that are elsewhere; {self.instead}",
                RuntimeWarning,
                stacklevel=5,  # Outside of clip_grad_norm_.
            )

    def __contains__(self, parameter: object) -> bool:
        return _is_in(self._parameters, parameter)

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


def _check(name: str, parameters: Sequence[Tensor]) -> None:
    """Raises if gradients of parameters that are trained elsewhere are read."""
    for moved in list(_moved):  # Mostly there are none.
        there = [each for each in parameters if each in moved]
        if there and all(each.grad is None for each in there):
            raise ConfigurationError(
                f"{name} was given {len(there)} parameters of this process that are trained "
                f"elsewhere, where it does not reach them; {moved.instead}"
            )
        if name.startswith("clip_"):
            moved.warn_of_rest(name, parameters)
