"""Runs a function for a batch of calls: stacks the arguments, splits the result, tells who failed.

The *kind* of a call is the structure of its arguments with the dtype, device and shape of each
tensor. Calls of one kind can be stacked.

The graphs of the callers stay apart. To stack their tensors within one graph would fail: the pass
of one caller would reach the tensors of all others, and free the graph for them. So the function
runs on a detached stack, in a graph of its own. Each caller gets nodes that lead to its own
arguments and to the leaves behind the function. Their backward runs the batch's graph, which no
pass frees. See ``docs/protocols/batching.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.contexts import PLACEHOLDER, current_id, set_current_id
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.reports import first_names
from torchweft.engine.wire.messages import NO_GRAD
from torchweft.engine.worker.calls import current_call
from torchweft.errors import AutogradError, BatchError
from torchweft.rpc.worker import Worker

# Nested values

_TENSOR, _OTHER = "tensor", "other"


class Keywords(dict[str, Any]):
    """The keyword arguments of a call, behind its positional ones."""


class Parts(NamedTuple):
    """A nested value taken apart.

    Attributes:
        structure: The containers, equal for values of equal structure.
        leaves: Tensors, and values that are neither tensors nor containers, in order.
    """

    structure: Any
    leaves: Sequence[Any]


def take_apart(value: Any) -> Parts:
    """Takes nested tuples, lists and dicts apart; the leaves of a dict are in order of its keys."""
    if type(value) is tuple and all(type(each) is Tensor for each in value):
        return Parts((tuple, [_TENSOR] * len(value)), value)  # The arguments of most calls.
    leaves: list[Any] = []
    return Parts(_structure(value, leaves), leaves)


def _structure(value: Any, leaves: list[Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value), [_structure(each, leaves) for each in value]
    if isinstance(value, dict):
        # Equal for dicts with the same keys, in whatever order they have them.
        found = {key: _structure(value[key], leaves) for key in _in_order(value)}
        return type(value), {key: found[key] for key in value}
    leaves.append(value)
    return _TENSOR if isinstance(value, Tensor) else _OTHER


def _in_order(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:
        return sorted(keys, key=lambda key: (str(type(key)), repr(key)))


def put_together(structure: Any, leaves: Iterator[Any]) -> Any:
    """Returns a value of a structure with other leaves, which it takes from an iterator."""
    if isinstance(structure, str):
        return next(leaves)
    kind, inner = structure
    if isinstance(inner, dict):
        values = {key: put_together(inner[key], leaves) for key in _in_order(inner)}
        return kind((key, values[key]) for key in inner)
    parts = [put_together(each, leaves) for each in inner]
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)  # a named tuple, if so


def kind_of(parts: Parts, is_padded: bool) -> Any:
    """Returns the kind of a call; with padding, the number of dimensions replaces the shape."""
    return parts.structure, [
        (leaf.dtype, leaf.device, leaf.ndim if is_padded else leaf.shape)
        for leaf in parts.leaves
        if isinstance(leaf, Tensor)
    ]


def shapes_of(parts: Parts) -> str:
    """Returns the dtypes and shapes of the tensors of a call, for messages."""
    tensors = [each for each in parts.leaves if isinstance(each, Tensor)]
    named = [f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors]
    others = len(parts.leaves) - len(tensors)
    return ", ".join([*named, *([f"{others} other"] if others else [])]) or "nothing"


def stack(columns: Sequence[Sequence[Any]], pad: float | None) -> list[Any]:
    """Joins the leaves of calls of one kind.

    Args:
        columns: For each leaf, its values in all calls.
        pad: The value that fills smaller tensors up, or None.

    Returns:
        For each leaf, a tensor with a new first dimension, or a list. A stacked tensor is a leaf
        that requires grad if any of its tensors requires grad; nothing leads from it to these.
    """
    return [_stacked(column, pad) if isinstance(column[0], Tensor) else list(column)
            for column in columns]  # fmt: skip


def _stacked(tensors: Sequence[Tensor], pad: float | None) -> Tensor:
    requires_grad = any(each.requires_grad for each in tensors)
    if requires_grad:
        tensors = [each.detach() for each in tensors]
    if pad is not None and any(each.shape != tensors[0].shape for each in tensors):
        joined = _padded(tensors, pad)
    else:
        joined = torch.stack(list(tensors))
    return joined.requires_grad_() if requires_grad else joined


def _padded(tensors: Sequence[Tensor], pad: float) -> Tensor:
    sizes = [max(size) for size in zip(*[each.shape for each in tensors], strict=True)]
    joined = tensors[0].new_full((len(tensors), *sizes), pad)
    for row, tensor in zip(joined, tensors, strict=True):
        row[region(tensor.shape)].copy_(tensor)
    return joined


def region(shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of the part of a padded row that a tensor of a shape fills."""
    return tuple([slice(size) for size in shape])


# Graphs


class Joined(NamedTuple):
    """The graph of a batch.

    Attributes:
        function: The name of its function.
        outputs: The tensors of the result that require grad.
        leaves: The leaves behind the outputs that are no arguments, such as parameters.
    """

    function: str
    outputs: list[Tensor]
    leaves: list[Tensor]


def graph_of(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Joined | None:
    """Returns the graph between stacked arguments and a result; None if there is none.

    Raises:
        AutogradError: The graph has nodes that callers cannot share.
    """
    tensors = {id(each): each for each in outputs if isinstance(each, Tensor)}
    ends = [each for each in tensors.values() if each.requires_grad]
    own = {id(each) for each in inputs}
    leaves: dict[int, Tensor] = {id(each): each for each in ends if each.is_leaf}
    seen: set[Node] = set()
    todo: list[Node | None] = [each.grad_fn for each in ends]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif isinstance(node, PLACEHOLDER):
            raise AutogradError(
                f"the result of {function} depends on a tensor that another worker has computed "
                "and that is not among the arguments of its calls: callers of a batch cannot share "
                "it. Detach it, pass it as an argument, or call a function that is not batched",
                operation=function,
            )
        todo += [following for following, _ in node.next_functions]
    others = [leaf for key, leaf in leaves.items() if key not in own]
    for leaf in others:
        if leaf._backward_hooks:
            raise AutogradError(
                f"a leaf of shape {list(leaf.shape)} behind the result of {function} has a hook, "
                "which would be called twice in a pass through a batched call: use "
                "register_post_accumulate_grad_hook, or call a function that is not batched",
                operation=function,
            )
    return Joined(function, ends, others) if ends else None


class _Cut(torch.autograd.Function):
    """The outputs of a batch's graph, which lead to the arguments of one call and to the leaves.

    Of a row of one call, or of all rows for calls without gradients of their own: these lead to
    the leaves alone, and can be differentiated any number of times.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: Joined, row: int | None, columns: list[Tensor], *inputs: Tensor
    ) -> Any:
        """Returns the outputs; ``columns`` are the stacked arguments that have the first inputs."""
        ctx.set_materialize_grads(False)
        # The tensors themselves would keep their graphs, and so form a circle with this node.
        ctx.graph, ctx.row, ctx.columns = graph, row, columns
        ctx.shapes = [each.shape for each in inputs[: len(columns)]]
        outputs = [each.detach() for each in graph.outputs]
        return tuple(outputs if row is None else [each[row].clone() for each in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph, row, own = ctx.graph, ctx.row, len(ctx.columns)
        if own and torch.is_grad_enabled():
            raise AutogradError(
                f"second derivatives (create_graph=True) through a batched call of "
                f"{graph.function} are not supported if its arguments require grad; call a "
                "function that is not batched",
                operation=graph.function,
            )
        pairs = [
            (output, gradient if row is None else _widened(output, gradient, row))
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None
        ]
        targets = [*ctx.columns, *graph.leaves]
        if not pairs or not targets:
            return None, None, None, *[None] * len(targets)
        outputs, known = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            *(outputs, targets, known),
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        rows = [
            None if each is None else each[row][region(shape)]
            for each, shape in zip(found[:own], ctx.shapes, strict=True)
        ]
        return None, None, None, *rows, *found[own:]


def _widened(output: Tensor, gradient: Tensor, row: int) -> Tensor:
    """Returns the gradient of a whole output for that of one row; the others are zero."""
    wide = torch.zeros_like(output)
    wide[row] = gradient
    return wide


# Batches


class Options(NamedTuple):
    """The arguments of ``batched``."""

    largest: int = 64
    smallest: int = 1
    longest_wait_s: float = 0.005
    limit: int = 4096
    pad: float | None = None
    isolate: bool = False


class BatchedCall(Protocol):
    """A call of a batched function, by another worker or by a thread of this one."""

    peer: Any
    context_id: int
    owned: Any

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends the call with its outcome."""

    def is_unwanted(self, now_s: float) -> bool:
        """Whether its caller no longer waits."""


class Entry(NamedTuple):
    """A call in a queue.

    Attributes:
        call: Ends with its outcome.
        bound: The object whose method is called, or nothing.
        parts: The other arguments.
        arrived_s: When it was put into the queue.
        mark: The end of the GPU work that computes the arguments.
    """

    call: BatchedCall
    bound: tuple[Any, ...]
    parts: Parts
    arrived_s: float
    mark: Mark | None = None

    @property
    def caller(self) -> str:
        """Name of the worker that makes the call."""
        name: str = self.call.peer.name
        return name


Outcome = tuple[Any, BaseException | None]


class Runner:
    """Runs one function for several calls at once.

    Args:
        function: Called with stacked arguments.
        name: Its name, for messages.
        options: The options of the decorator.
        worker: The worker whose calls they are; None in a process that is no worker.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options,
        worker: Worker | None = None,
    ) -> None:
        self._worker = worker
        self._function = function
        self._name = name
        self._options = options
        self._former_kind: Any = None
        """The kind of the calls for which the function ran last, without an error."""

    def outcomes(self, entries: list[Entry]) -> list[Outcome]:
        """Returns the outcome of each call; never raises."""
        try:
            for entry in entries:
                if entry.mark is not None:
                    device_streams.use(entry.mark, entry.parts.leaves)
            return self._of_usual_kind(entries)
        except BaseException as error:
            return [(None, error)] * len(entries)

    def _of_usual_kind(self, entries: list[Entry]) -> list[Outcome]:
        """Runs the calls of the kind that most have; in a tie, the former batch's, or the first.

        The others fail.
        """
        is_padded = self._options.pad is not None
        kinds = [kind_of(entry.parts, is_padded) for entry in entries]
        usual = kinds[0]
        if len(entries) > 1 and any(kind != usual for kind in kinds):
            usual = max(kinds, key=lambda kind: (kinds.count(kind), kind == self._former_kind))
        members = [entry for entry, kind in zip(entries, kinds, strict=True) if kind == usual]
        found = iter(self._run(members, usual))
        return [
            next(found) if kind == usual else (None, self._differs(entry, members[0]))
            for entry, kind in zip(entries, kinds, strict=True)
        ]

    def _differs(self, entry: Entry, other: Entry) -> BatchError:
        """Returns the error of a call that differs from most of its batch."""
        own_shapes, other_shapes = shapes_of(entry.parts), shapes_of(other.parts)
        is_of_structure = entry.parts.structure == other.parts.structure
        how = "" if is_of_structure else " as it differs in the structure of its arguments"
        return BatchError(
            f"the call of {self._name} by worker {entry.caller!r} cannot be stacked with the "
            f"others of its batch{how}: it has {own_shapes}, the others have {other_shapes}. Send "
            "arguments of one shape, or see pad= of batched",
            call=self._name,
            callers=(entry.caller,),
            shapes=(own_shapes,),
        )

    def _run(self, entries: list[Entry], kind: Any) -> list[Outcome]:
        """Runs calls of one kind; with ``isolate``, by halves after an error."""
        try:
            rows = self._rows(entries)
            self._former_kind = kind
            return [(row, None) for row in rows]
        except BaseException as error:
            if not self._options.isolate or len(entries) == 1:
                return self._failed(entries, error)
        middle = len(entries) // 2
        return self._run(entries[:middle], kind) + self._run(entries[middle:], kind)

    def _failed(self, entries: list[Entry], error: BaseException) -> list[Outcome]:
        if len(entries) > 1 and hasattr(error, "add_note"):  # Python 3.10 has no notes.
            callers = first_names([entry.caller for entry in entries])
            error.add_note(f"in a batch of {len(entries)} calls of {self._name}, by {callers}")
        return [(None, error)] * len(entries)

    def _rows(self, entries: list[Entry]) -> list[Any]:
        """Runs the function for calls of one kind; returns the result of each call."""
        columns = list(zip(*[entry.parts.leaves for entry in entries], strict=True))
        stacked = stack(columns, self._options.pad)
        result = self._made(entries, put_together(entries[0].parts.structure, iter(stacked)))
        graph = None
        if any(entry.call.context_id != NO_GRAD for entry in entries):
            graph = graph_of(self._name, stacked, result.leaves)
        split = [
            each.detach().unbind() if isinstance(each, Tensor) else [each] * len(entries)
            for each in result.leaves
        ]
        shared: Sequence[Tensor] = ()
        rows = []
        for place, entry in enumerate(entries):
            leaves: Sequence[Any] = [column[place] for column in split]
            if graph is not None and entry.call.context_id != NO_GRAD:
                outputs = self._outputs_of(place, columns, stacked, graph)
                if outputs is None:
                    shared = shared or _cut(graph, None, [], [])
                    outputs = [each[place] for each in shared]
                recorded = dict(zip(map(id, graph.outputs), outputs, strict=True))
                leaves = [
                    recorded.get(id(whole), leaf)
                    for whole, leaf in zip(result.leaves, leaves, strict=True)
                ]
            if entry.call.owned is not None or entry.call.peer.is_self:
                # The result stays on this worker: it must not keep the memory of the batch.
                leaves = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
            rows.append(put_together(result.structure, iter(leaves)))
        return rows

    def _made(self, entries: list[Entry], args: Sequence[Any]) -> Parts:
        """Calls the function with stacked arguments; returns its checked result."""
        kwargs = {}
        if args and type(args[-1]) is Keywords:
            *args, kwargs = args
        run = partial(_outside_of_calls, self._function, *entries[0].bound, *args, **kwargs)
        carrier = None if self._worker is None else self._worker.carrier
        if carrier is None:
            result = take_apart(run())
        else:
            calls = [entry.call for entry in entries]
            result = take_apart(carrier.run_batch(calls, self._function, run))
        count = len(entries)
        for leaf in result.leaves:
            if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != count):
                callers = [entry.caller for entry in entries]
                raise BatchError(
                    f"{self._name} was given a batch of {count} calls and returned a tensor of "
                    f"shape {list(leaf.shape)}; the first dimension of each tensor that it returns "
                    f"must be {count}, a row for each call. The calls are those of "
                    f"{first_names(callers)}",
                    call=self._name,
                    callers=tuple(callers),
                    shapes=tuple([shapes_of(result)] * count),
                )
        return result

    def _outputs_of(
        self,
        place: int,
        columns: Sequence[Sequence[Any]],
        stacked: Sequence[Any],
        graph: Joined,
    ) -> Sequence[Tensor] | None:
        """Returns the outputs of a call whose arguments require grad; None if none of them does."""
        own = [
            (column[place], joined)
            for column, joined in zip(columns, stacked, strict=True)
            if isinstance(column[place], Tensor) and column[place].requires_grad
        ]
        if not own:
            return None
        tensors, own_columns = map(list, zip(*own, strict=True))
        return _cut(graph, place, own_columns, tensors)


def _cut(
    graph: Joined, row: int | None, columns: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    apply: Any = _Cut.apply
    outputs: Sequence[Tensor] = apply(graph, row, columns, *inputs, *graph.leaves)
    return outputs


def _outside_of_calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function serves many callers, and has the time limit and the context of none."""
    before = current_call.set(None)
    context_id = current_id()
    set_current_id(0)
    try:
        return function(*args, **kwargs)
    finally:
        set_current_id(context_id)
        current_call.reset(before)
