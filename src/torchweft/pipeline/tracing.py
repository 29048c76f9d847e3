"""The operations of a model in their order: recorded with torch.fx, and run by the stages.

Only modules with a cut inside are run for the record. All others are one operation each, so their
code need not be traceable. A ``TracedStage`` travels to its worker as plain data. It keeps the
model's submodules under their names, so that its weights have the names that they have in the
model.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from torchweft.pipeline.errors import CutError

_RANDOM = ("rand", "randn", "randint", "randperm")
_MADE = ("arange", "empty", "eye", "finfo", "full", "linspace", "ones", "tensor", "zeros")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_INSTEAD = (
    "Only modules with a cut inside are traced: cut before or after the module instead, or put the "
    "line into a submodule of its own, or pass Pipe a list of stage modules"
)


@dataclass
class ModelTrace:
    """A recorded run of a model.

    Attributes:
        steps: The operations.
        spans: For each module with a cut before or after it, the numbers of its first step and of
            the step behind its last one, for each of its calls.
        only_mode: The training mode that the steps are for; None for both.
    """

    steps: list[Operation]
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    only_mode: bool | None = None


def trace(
    model: nn.Module, points: Collection[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModelTrace:
    """Records a model with symbolic values, in training and in evaluation mode.

    The model is as before afterwards. No other thread may use torch modules meanwhile.

    Args:
        model: The model.
        points: Names of the modules with a cut before or after them.
        args: The model's positional arguments; ``INPUT`` stands for an input.
        kwargs: The model's keyword arguments.

    Raises:
        CutError: The code of a module with a cut inside cannot be traced.
    """
    found = _trace(model, points, args, kwargs)
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = not modes[model]
        other = _trace(model, points, args, kwargs)
    except CutError:
        return ModelTrace(found.steps, found.spans, only_mode=modes[model])
    finally:
        for module, mode in modes.items():
            module.training = mode
    try:
        steps = [
            _merged(first, second, model.training)
            for first, second in zip(found.steps, other.steps, strict=True)
        ]
    except ValueError:
        return ModelTrace(found.steps, found.spans, only_mode=model.training)
    return ModelTrace(steps, found.spans)


INPUT = object()
"""Stands for an input of the model."""


def _trace(
    model: nn.Module, points: Collection[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModelTrace:
    before = set(vars(model))
    tracer = _Tracer(model, points, args, kwargs)
    try:
        with torch.enable_grad(), _recorded_factories(tracer):
            graph = tracer.trace(model)
        return ModelTrace([_step(model, tracer, node) for node in graph.nodes], tracer.spans)
    except CutError:
        raise
    except Exception as error:
        raise _untraceable(model, error) from error
    finally:
        for name in set(vars(model)) - before:  # Constants, which the tracer puts there.
            delattr(model, name)


class _Tracer(fx.Tracer):
    """Runs a model with symbolic values.

    Args:
        model: The model.
        points: Names of the modules whose calls it notes in ``spans``.
        args: Positional arguments of the model.
        kwargs: Keyword arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Collection[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.spans: dict[str, list[tuple[int, int]]] = {name: [] for name in points}
        self.places: dict[fx.Node, str] = {}
        self._model = model
        self._arguments = args, kwargs
        self._points = {model.get_submodule(name): name for name in points}
        self._through = {model}
        for name in points:
            ends = [place for place, letter in enumerate(name) if letter == "."]
            self._through.update(model.get_submodule(name[:end]) for end in ends)
        self._modes = _modes()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Makes the inputs; overridden because only some arguments are inputs."""
        args, kwargs = self._arguments
        given = [
            self.create_proxy("placeholder", f"input_{number}", (), {}) if each is INPUT else each
            for number, each in enumerate((*args, *kwargs.values()))
        ]
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        return lambda: self._model.forward(*given[: len(args)], **named), []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is recorded as one operation."""
        return m not in self._through

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Records or runs a module, and notes where the calls at cuts begin and end."""
        begin = len(self.graph.nodes)
        result = super().call_module(m, forward, args, kwargs)
        if m in self._points:
            self.spans[self._points[m]].append((begin, len(self.graph.nodes)))
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Records an operation, and its place in the model's code."""
        if _modes() != self._modes:
            raise TypeError(
                "operations under torch.no_grad, inference_mode or autocast cannot be traced"
            )
        node = super().create_node(*args, **kwargs)
        self.places[node] = _place(_frames(sys._getframe(1)))
        return node


def _modes() -> tuple[bool, bool, bool]:
    """Returns the modes of this thread that a graph cannot express."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    )


@contextlib.contextmanager
def _recorded_factories(tracer: fx.Tracer) -> Iterator[None]:
    """Records functions that make tensors, where sizes are symbolic or the numbers are random.

    Torch hands calls of functions to a tracer only if an argument stands for a tensor.
    """
    originals = {name: getattr(torch, name) for name in (*_RANDOM, *_MADE)}

    def recording(name: str) -> Callable[..., Any]:
        original = originals[name]

        def record(*args: Any, **kwargs: Any) -> Any:
            leaves = _pytree.tree_leaves((args, kwargs))
            if name in _RANDOM or any(isinstance(each, fx.Proxy) for each in leaves):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return record

    for name in originals:
        setattr(torch, name, recording(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


_KINDS = {
    "placeholder": "input",
    "get_attr": "state",
    "call_module": "module",
    "call_method": "method",
    "call_function": "function",
    "output": "output",
}


def _step(model: nn.Module, tracer: _Tracer, node: fx.Node) -> Operation:
    args, kwargs = (_stood_for(model, each) for each in (node.args, node.kwargs))
    return Operation(node.name, _KINDS[node.op], node.target, args, kwargs, tracer.places[node])


def _stood_for(model: nn.Module, value: Any) -> Any:
    """Returns an argument with nodes replaced by ``Value``, ``StateName`` or constants."""
    if not isinstance(value, fx.Node):
        return mapped(value, lambda each: _stood_for(model, each))
    if value.op != "get_attr":
        return Value(value.name)
    name = str(value.target)
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last in module._parameters or last in module._buffers:
        return StateName(name)
    return getattr(module, last)


def _merged(first: Any, second: Any, first_mode: bool) -> Any:
    """Returns what two traces have in common, with ``ByMode`` where constants differ.

    Raises:
        ValueError: They differ in more than constants.
    """
    if isinstance(first, Operation):
        if first[:3] != second[:3]:
            raise ValueError("two operations")
        args, kwargs = _merged(first[3:5], second[3:5], first_mode)
        return Operation(*first[:3], args, kwargs, first.place)
    if isinstance(first, (Value, StateName)) or isinstance(second, (Value, StateName)):
        if first != second:
            raise ValueError("two values")
        return first
    if isinstance(first, (tuple, list, dict, slice)) and type(first) is type(second):
        ones, others = _pieces(first), _pieces(second)
        merged = iter([_merged(*pair, first_mode) for pair in zip(ones, others, strict=True)])
        return mapped(first, lambda _: next(merged))
    if first is second or _is_equal(first, second):
        return first
    return ByMode(first, second) if first_mode else ByMode(second, first)


def _pieces(value: Any) -> list[Any]:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return list(value.values()) if isinstance(value, dict) else list(value)


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _untraceable(model: nn.Module, error: Exception) -> CutError:
    """Returns the error for code that cannot be traced."""
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append((at.tb_frame, at.tb_lineno))
        at = at.tb_next
    names = {module: name for name, module in model.named_modules()}
    frames.reverse()
    owners = (frame.f_locals.get("self") for frame, _ in frames)
    module = next((each for each in owners if isinstance(each, nn.Module)), model)
    name, place = names.get(module, ""), _place(frames)
    shown = f"{name!r}, a {type(module).__name__}," if name else f"the {type(module).__name__}"
    return CutError(
        f"torch.fx cannot trace {shown} at {place}: {error}. {_INSTEAD}", module=name, place=place
    )


def _frames(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields a frame and its line, and those that called it, one after the other."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns file, line and text of the first of these frames that is in the model's code."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and file != __file__:
            text = linecache.getline(file, line).strip()
            return f"{file}:{line} `{text}`" if text else f"{file}:{line}"
    return "torch"


# The stages


@dataclass(frozen=True)
class Value:
    """Stands in arguments for the result of an operation, or for an argument of the part."""

    name: str


@dataclass(frozen=True)
class StateName:
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
        args: Positional arguments; ``Value``, ``StateName`` and ``ByMode`` stand for others.
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


class TracedStage(nn.Module):
    """Runs some operations of a model.

    Args:
        inputs: The names of its positional arguments.
        operations: The operations.
        result: What it returns; ``Value`` and ``StateName`` stand for others.
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
        if isinstance(value, StateName):
            owner, _, name = value.name.rpartition(".")
            return getattr(self.get_submodule(owner), name)
        if isinstance(value, ByMode):
            return value.training if self.training else value.evaluation
        return mapped(value, lambda each: self._filled(each, values))

    def place(self, name: str, value: nn.Module | Tensor, *, is_persistent: bool = True) -> None:
        """Adds a submodule, weight or buffer of the model under its name, if it is not there."""
        owner: nn.Module = self
        *path, last = name.split(".")
        for each in path:
            if each not in owner._modules:
                owner.add_module(each, nn.Module())
            owner = owner.get_submodule(each)
        if getattr(owner, last, None) is not None:
            return
        if isinstance(value, nn.Module):
            owner.add_module(last, value)
        elif isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value, persistent=is_persistent)


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
