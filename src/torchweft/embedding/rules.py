"""Optimizers on rows: each changes the rows of a step, and the state beside them.

A rule is given copies of the rows that have a gradient, each once; other rows are not touched. SGD,
Adagrad and sparse Adam are those of ``torch.optim`` for sparse gradients. Momentum is lazy: a row
that is not touched keeps its velocity, and does not move.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from torchweft.arguments import is_number
from torchweft.errors import ConfigurationError
from torchweft.extending import rebuilds_plain

State = dict[str, Tensor]
_fused_adagrad: Any = getattr(torch, "_fused_adagrad_", None)
_MOMENTS: Final = 2
_FIRST_STEP: Final = torch.ones((), device="cpu")


@dataclass(frozen=True)
class Rule(abc.ABC):
    """How an optimizer changes rows.

    Args:
        lr: Learning rate at the beginning.
    """

    lr: float = 0.01

    def __post_init__(self) -> None:
        self._check("lr", lambda lr: lr >= 0, "a number of at least 0")

    def _check(self, name: str, is_valid: Callable[[float], bool], expected: str) -> None:
        """Checks a setting: a number, or all of several numbers."""
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(is_number(each) and is_valid(each) for each in numbers):
            raise ConfigurationError(
                f"{type(self).__name__} has {name}={value!r}; it is {expected}"
            )

    def settings(self) -> str:
        """Returns its name and all settings but the learning rate, which a program may change."""
        others = [each.name for each in fields(self) if each.name != "lr"]
        listed = ", ".join(f"{name}={getattr(self, name)}" for name in others)
        return f"{type(self).__name__}({listed})"

    needs_whole_rows = False
    """Whether the change of a value depends on the other columns, so that all must be here."""

    @abc.abstractmethod
    def state_for(self, weights: Tensor) -> State:
        """Returns the state of new rows ``(rows, dim)``; each tensor has a row for each of them."""

    @abc.abstractmethod
    def apply(
        self, weights: Tensor, state: State, gradients: Tensor, lr: float, step: Tensor
    ) -> None:
        """Changes rows and their state in place.

        Args:
            weights: The rows that have a gradient, ``(n, dim)``.
            state: Their state.
            gradients: Their gradients, ``(n, dim)``; not changed.
            lr: The learning rate of this step.
            step: How many steps the table of each row has made, this one included: a float64
                tensor without dimensions, or ``(n, 1)``.
        """


@rebuilds_plain
@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent: ``torch.optim.SGD`` with sparse gradients.

    Args:
        lr: Learning rate at the beginning.
        momentum: Factor of the velocity of a row, once for each step that touches the row.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", lambda value: 0 <= value < 1, "a number from 0 to less than 1")

    def state_for(self, weights: Tensor) -> State:
        """Returns the velocities, zeros, if there is momentum."""
        return {"velocity": torch.zeros_like(weights)} if self.momentum else {}

    def apply(
        self, weights: Tensor, state: State, gradients: Tensor, lr: float, step: Tensor
    ) -> None:
        """Changes rows and their state in place."""
        if self.momentum:
            gradients = state["velocity"].mul_(self.momentum).add_(gradients)
        weights.add_(gradients, alpha=-lr)


@rebuilds_plain
@dataclass(frozen=True)
class Adagrad(Rule):
    """``torch.optim.Adagrad`` with sparse gradients.

    Args:
        lr: Learning rate at the beginning.
        lr_decay: Decay of the learning rate with the steps of a table.
        initial_accumulator_value: Initial sum of squares.
        eps: Added to the root of the sum.
    """

    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            self._check(name, lambda value: value >= 0, "a number of at least 0")

    def state_for(self, weights: Tensor) -> State:
        """Returns the sums of squares of each value."""
        return {"sum": torch.full_like(weights, self.initial_accumulator_value)}

    def apply(
        self, weights: Tensor, state: State, gradients: Tensor, lr: float, step: Tensor
    ) -> None:
        """Changes rows and their state in place."""
        if self._is_fused(weights, state["sum"], gradients):
            _fused_adagrad(
                [weights],
                [gradients],
                [state["sum"]],
                [_FIRST_STEP],
                lr=lr,
                lr_decay=0.0,
                weight_decay=0.0,
                eps=self.eps,
                maximize=False,
            )
            return
        squares = self._squares(gradients)
        # The memory of the squares is in the cache; new tensors would not be.
        deviation = torch.sqrt(state["sum"].add_(squares), out=squares).add_(self.eps)
        whole = deviation.shape == gradients.shape
        change = torch.div(gradients, deviation, out=deviation if whole else None)
        if self.lr_decay:
            change *= (1 / (1 + (step - 1) * self.lr_decay)).to(change.dtype)
        weights.add_(change, alpha=-lr)

    def _is_fused(self, weights: Tensor, sums: Tensor, gradients: Tensor) -> bool:
        """Whether torch changes these rows in one pass: in a third of the time of six passes."""
        return (
            _fused_adagrad is not None
            and not self.lr_decay  # The steps of tables differ.
            and sums.shape == weights.shape
            and all(each.is_contiguous() for each in (weights, sums, gradients))
        )

    def _squares(self, gradients: Tensor) -> Tensor:
        return gradients.square()


@rebuilds_plain
@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum for each row: of the mean of its squared gradients.

    As in FBGEMM (``EXACT_ROWWISE_ADAGRAD``) and torchrec; its state is ``1 / dim`` of Adagrad's.
    """

    needs_whole_rows = True

    def state_for(self, weights: Tensor) -> State:
        """Returns the sums of mean squares of each row."""
        return {"sum": weights.new_full((len(weights), 1), self.initial_accumulator_value)}

    def _squares(self, gradients: Tensor) -> Tensor:
        return gradients.square().mean(1, keepdim=True)


@rebuilds_plain
@dataclass(frozen=True)
class SparseAdam(Rule):
    """``torch.optim.SparseAdam``: Adam whose moments change only where a row has a gradient.

    Args:
        lr: Learning rate at the beginning.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        expected = "a pair of numbers from 0 to less than 1"
        is_pair = isinstance(self.betas, tuple) and len(self.betas) == _MOMENTS
        self._check("betas", lambda beta: is_pair and 0 <= beta < 1, expected)
        self._check("eps", lambda value: value > 0, "a number greater than 0")

    def state_for(self, weights: Tensor) -> State:
        """Returns both moments, zeros."""
        return {"first": torch.zeros_like(weights), "second": torch.zeros_like(weights)}

    def apply(
        self, weights: Tensor, state: State, gradients: Tensor, lr: float, step: Tensor
    ) -> None:
        """Changes rows and their state in place."""
        first_decay, second_decay = self.betas
        first = state["first"].lerp_(gradients, 1 - first_decay)
        second = state["second"].lerp_(gradients.square(), 1 - second_decay)
        correction = (1 - second_decay**step).sqrt() / (1 - first_decay**step)
        change = first / second.sqrt().add_(self.eps)
        change *= correction.to(change.dtype)
        weights.add_(change, alpha=-lr)
