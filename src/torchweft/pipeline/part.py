"""A stage of a model that was cut at named points: some operations of the model, in their order.

A part travels to its worker as plain data. It keeps the model's submodules under their names, so
that its weights have the names that they have in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchweft.pipeline.errors import CutError


@dataclass(frozen=True)
class Value:
    """Stands in arguments for the result of an operation, or for an argument of the part."""

    name: str


@dataclass(frozen=True)
class State:
    """Stands in arguments for a weight or buffer of the part."""

    name: str


@dataclass(frozen=True)
class ByMode:
    """Stands in arguments for a constant that depends on whether the part is in training mode."""

    training: Any
    evaluation: Any


class Operation(NamedTuple):
    """One operation of a model.

    Attributes:
        name: The name of its result.
        kind: ``"module"``, ``"method"`` or ``"function"``; in a trace also ``"input"``, ``"state"``
            for a weight or buffer, and ``"output"``, whose argument is the model's result.
        target: The name of a submodule, the name of a method of the first argument, or a function.
        args: Positional arguments; ``Value``, ``State`` and ``ByMode`` stand for others.
        kwargs: Keyword arguments.
        place: File and line of the model's code.
        last_uses: The names of values that no later operation uses.
    """

    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: str
    last_uses: tuple[str, ...] = ()


class Part(nn.Module):
    """Runs some operations of a model.

    Args:
        inputs: The names of its positional arguments.
        operations: The operations.
        result: What it returns; ``Value`` and ``State`` stand for others.
        only_mode: The training mode that the operations are for; None for both.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        operations: Sequence[Operation],
        result: Any,
        only_mode: bool | None,
    ) -> None:
        super().__init__()
        self._inputs = tuple(inputs)
        self._operations = tuple(operations)
        self._result = result
        self._only_mode = only_mode

    @property
    def part_names(self) -> list[str]:
        """The names of the model's submodules that it runs, each once."""
        names = [each.target for each in self._operations if each.kind == "module"]
        return list(dict.fromkeys(names))

    def forward(self, *inputs: Any) -> Any:
        """Runs the operations; returns the result.

        Raises:
            CutError: The model does other operations in this training mode.
        """
        if self._only_mode not in (None, self.training):
            modes = ("training", "evaluation") if self._only_mode else ("evaluation", "training")
            raise CutError(
                f"the model was cut in {modes[0]} mode, and does other operations in {modes[1]} "
                f"mode; cut it in {modes[1]} mode for that, or move its `if self.training` into a "
                "submodule without a cut inside"
            )
        values = dict(zip(self._inputs, inputs, strict=True))
        del inputs
        for operation in self._operations:
            values[operation.name] = self._run(operation, values)
            for name in operation.last_uses:
                del values[name]
        return self._filled(self._result, values)

    def _run(self, operation: Operation, values: dict[str, Any]) -> Any:
        args = [self._filled(each, values) for each in operation.args]
        kwargs = {name: self._filled(each, values) for name, each in operation.kwargs.items()}
        try:
            if operation.kind == "module":
                return self.get_submodule(operation.target)(*args, **kwargs)
            if operation.kind == "method":
                return getattr(args[0], operation.target)(*args[1:], **kwargs)
            return operation.target(*args, **kwargs)
        except Exception as error:
            if hasattr(error, "add_note"):  # From Python 3.11 on.
                error.add_note(f"in the model's {operation.place}")
            raise

    def _filled(self, value: Any, values: dict[str, Any]) -> Any:
        """Returns a value with those put in that others stand for."""
        if isinstance(value, Value):
            return values[value.name]
        if isinstance(value, State):
            owner, _, name = value.name.rpartition(".")
            return getattr(self.get_submodule(owner), name)
        if isinstance(value, ByMode):
            return value.training if self.training else value.evaluation
        return mapped(value, lambda each: self._filled(each, values))

    # The model's submodules and weights

    def add_submodule_named(self, name: str, module: nn.Module) -> None:
        """Adds a submodule of the model under its name."""
        if not self._has(name):
            owner, _, last = name.rpartition(".")
            self._shell(owner).add_module(last, module)

    def add_state_named(self, name: str, tensor: Tensor, *, is_persistent: bool) -> None:
        """Adds a weight or buffer of the model under its name."""
        if not self._has(name):
            owner, _, last = name.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                self._shell(owner).register_parameter(last, tensor)
            else:
                self._shell(owner).register_buffer(last, tensor, persistent=is_persistent)

    def _has(self, name: str) -> bool:
        found: Any = self
        for each in name.split("."):
            found = getattr(found, each, None)
        return found is not None

    def _shell(self, name: str) -> nn.Module:
        """Returns the submodule of that name; makes it, empty, if there is none."""
        found: nn.Module = self
        for each in name.split(".") if name else ():
            if each not in found._modules:
                found.add_module(each, nn.Module())
            found = found.get_submodule(each)
        return found


def mapped(value: Any, function: Any) -> Any:
    """Returns a tuple, list, dict or slice with a function applied to its parts."""
    if isinstance(value, tuple):
        parts = map(function, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [function(each) for each in value]
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return value
