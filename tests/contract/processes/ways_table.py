"""The table of torch's ways to train: what each does where a part of the graph is elsewhere.

A row is a program of a *side*: it calls functions and runs passes by the side's methods. On the
side ``Alone`` they are local calls and torch's own passes. On the other sides, another process
runs the functions, and the passes are Weft's: in a context, or outside of any. A row *as in one
process* must return the same everywhere, a row *error* must raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft import autograd, rpc

WORKER = "worker0"
SAME, ERROR, OWN = "as in one process", "error", "each worker for itself"
DIFFERS = "differs"
"""What a row of the page says."""

WEIGHT = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
"""The parameter of the functions that rows call; each process has one of its own."""
X = torch.tensor([0.5, -1.0, 2.0])


class Side:
    """How a row calls functions and runs passes."""

    is_in_context = False

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function where ``WEIGHT`` has its gradient."""
        return rpc.rpc_sync(WORKER, function, args, kwargs)

    def backward(self, loss: Any, **options: Any) -> None:
        """Runs a backward pass."""
        autograd.backward(loss, **options)

    def grad(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns gradients of tensors of this process."""
        with autograd.context() as context_id:
            return autograd.grad(context_id, outputs, inputs, **options)

    def gradient(self, leaf: Tensor) -> Tensor | None:
        """Returns the gradient of a leaf of this process."""
        return leaf.grad

    def weight_gradient(self) -> Tensor | None:
        """Returns the gradient of ``WEIGHT`` where the functions run."""
        found: Tensor | None = self.call(take_gradient, 0)
        return found


class Alone(Side):
    """One process, without Weft."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def backward(self, loss: Any, **options: Any) -> None:
        torch.autograd.backward(loss, **options)

    def grad(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, inputs, **options)


class InContext(Side):
    """Another process, in an autograd context."""

    is_in_context = True

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id

    def grad(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        return autograd.grad(self.context_id, outputs, inputs, **options)

    def gradient(self, leaf: Tensor) -> Tensor | None:
        return autograd.get_gradients(self.context_id).get(leaf)

    def weight_gradient(self) -> Tensor | None:
        found: Tensor | None = self.call(take_gradient, self.context_id)
        return found


def take_gradient(context_id: int) -> Tensor | None:
    """Returns the gradient of ``WEIGHT`` in this process, and removes that in ``.grad``."""
    if context_id:
        return autograd.get_gradients(context_id).get(WEIGHT)
    found, WEIGHT.grad = WEIGHT.grad, None
    return found


Program = Callable[[Any], Any]


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        section: The heading under which it stands.
        name: Its first column.
        verdict: ``SAME``, ``ERROR``, ``OWN`` or ``DIFFERS``.
        program: Returns what is compared.
        where: The sides on which it runs, beside ``Alone``.
        match: What an error says.
    """

    section: str
    name: str
    verdict: str
    program: Program
    where: Sequence[str]
    match: str = ""


ROWS: list[Row] = []
EVERYWHERE = ("context", "outside")


class Section:
    """Adds rows under one heading.

    Args:
        title: The heading.
    """

    def __init__(self, title: str) -> None:
        self._title = title

    def same(self, name: str, where: Sequence[str] = EVERYWHERE) -> Callable[[Program], Program]:
        """Adds a row that gives on every side what one process gives."""
        return self._add(name, SAME, where)

    def error(
        self, name: str, match: str, where: Sequence[str] = EVERYWHERE
    ) -> Callable[[Program], Program]:
        """Adds a row that raises."""
        return self._add(name, ERROR, where, match)

    def own(self, name: str) -> Callable[[Program], Program]:
        """Adds a row that checks itself what the worker sees."""
        return self._add(name, OWN, ("context",))

    def differs(self, name: str, where: Sequence[str] = EVERYWHERE) -> Callable[[Program], Program]:
        """Adds a row that checks itself how Weft differs."""
        return self._add(name, DIFFERS, where)

    def _add(
        self, name: str, verdict: str, where: Sequence[str], match: str = ""
    ) -> Callable[[Program], Program]:
        def add(program: Program) -> Program:
            ROWS.append(Row(self._title, name, verdict, program, where, match))
            return program

        return add


def leaf(values: Tensor = X) -> Tensor:
    """Returns a new leaf that requires grad."""
    return values.clone().requires_grad_()


def refuse_all(ways: Iterable[Callable[[], object]], *texts: str) -> None:
    """Calls functions, all of which must raise an error with one of the texts; then raises."""
    for number, way in enumerate(ways):
        try:
            way()
        except Exception as error:
            if not any(text in str(error) for text in texts):
                raise
        else:
            raise AssertionError(f"number {number} raises nothing")
    raise RuntimeError("all are refused")


# Functions that rows call.


def layer(x: Tensor) -> Tensor:
    return torch.tanh(x * WEIGHT)


def square(x: Tensor) -> Tensor:
    return x * x


def apply(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; for programs whose whole body runs at the worker."""
    return function(*args)
