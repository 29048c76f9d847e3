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

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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

_TENSOR, _OTHER = "tensor", "other"


class Parts(NamedTuple):
    """A nested value taken apart.

    Attributes:
        structure: The containers, equal for values of equal structure.
        leaves: Tensors, and values that are neither tensors nor containers, in order.
    """

    structure: Hashable
    leaves: Sequence[Any]


def take_apart(value: Any) -> Parts:
    """Takes nested tuples, lists and dicts apart; the leaves of a dict are in order of its keys."""
    if type(value) is tuple:
        # The arguments of most calls: a few tensors, or one.
        for each in value:
            if type(each) is not Tensor:
                break
        else:
            return Parts(tensors_alone(len(value)), value)
    leaves: list[Any] = []
    return Parts(_structure(value, leaves), leaves)


@functools.cache
def tensors_alone(count: int) -> Hashable:
    """Returns the structure of a tuple of tensors."""
    return tuple, (_TENSOR,) * count


def _structure(value: Any, leaves: list[Any]) -> Hashable:
    if isinstance(value, Tensor):
        leaves.append(value)
        return _TENSOR
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_structure(each, leaves) for each in value])
    if isinstance(value, dict):
        keys = Keys(value)
        return type(value), keys, tuple([_structure(value[key], leaves) for key in keys.ordered])
    leaves.append(value)
    return _OTHER


class Keys:
    """The keys of a dict; equal for dicts with the same keys, in whatever order they have them."""

    __slots__ = ("given", "ordered")

    def __init__(self, keys: Iterable[Any]) -> None:
        self.given = tuple(keys)
        try:
            self.ordered = tuple(sorted(self.given))
        except TypeError:
            self.ordered = tuple(sorted(self.given, key=lambda key: (str(type(key)), repr(key))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self.ordered == other.ordered

    def __hash__(self) -> int:
        return hash(self.ordered)

    def joined(self, kind: Callable[[Any], Any], values: Iterable[Any]) -> Any:
        """Returns a dict of values that are in order, with its keys as they were given."""
        pairs = dict(zip(self.ordered, values, strict=True))
        return kind((key, pairs[key]) for key in self.given)


def put_together(structure: Any, leaves: Sequence[Any]) -> Any:
    """Returns a value of a structure with other leaves."""
    if structure is _TENSOR and len(leaves) == 1:
        return leaves[0]
    return _put_together(structure, iter(leaves))


def _put_together(structure: Any, leaves: Any) -> Any:
    if isinstance(structure, str):
        return next(leaves)
    kind = structure[0]
    values = [_put_together(each, leaves) for each in structure[-1]]
    if len(structure) == 3:
        return structure[1].joined(kind, values)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(values)
    return kind(values)


def kind_of(parts: Parts, is_padded: bool) -> Hashable:
    """Returns the kind of a call; with padding, the number of dimensions replaces the shape."""
    described: list[Any] = [parts.structure]
    for leaf in parts.leaves:
        if isinstance(leaf, Tensor):
            described += (leaf.dtype, leaf.device, leaf.ndim if is_padded else leaf.shape)
    return tuple(described)


def are_alike(calls: Sequence[Parts]) -> bool:
    """Returns whether all calls are of one kind. Hot path: does not look at the kinds."""
    structure, leaves = calls[0]
    if len(leaves) != 1 or not isinstance(leaves[0], Tensor):
        first = kind_of(calls[0], False)
        return all(kind_of(call, False) == first for call in calls)
    dtype, device, shape = leaves[0].dtype, leaves[0].device, leaves[0].shape
    for other, own in calls:
        if other is not structure and other != structure:
            return False
        leaf = own[0]
        if leaf.shape != shape or leaf.dtype is not dtype or leaf.device != device:
            return False
    return True


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
    requires_grad = False
    for tensor in tensors:
        if tensor.requires_grad:
            requires_grad = True
            tensors = [each.detach() for each in tensors]
            break
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


def check_rows(
    result: Parts, count: int, function: str, callers_of: Callable[[], Sequence[str]]
) -> None:
    """Raises BatchError unless each tensor of a result has a row for each call."""
    for leaf in result.leaves:
        if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != count):
            callers = callers_of()
            raise BatchError(
                f"{function} was given a batch of {count} calls and returned a tensor of shape "
                f"{list(leaf.shape)}; the first dimension of each tensor that it returns must be "
                f"{count}, a row for each call. The calls are those of {first_names(callers)}",
                call=function,
                callers=tuple(callers),
                shapes=tuple([shapes_of(result)] * len(callers)),
            )


def rows_of(result: Parts, count: int) -> list[Any]:
    """Splits a checked result into those of the calls."""
    structure, leaves = result
    if structure is _TENSOR:
        return list(leaves[0].unbind())
    columns = [each.unbind() if isinstance(each, Tensor) else [each] * count for each in leaves]
    if not columns:
        return [put_together(structure, ()) for _ in range(count)]
    return [put_together(structure, row) for row in zip(*columns, strict=True)]


def usual(groups: Mapping[Hashable, Sequence[Any]], former: Hashable) -> Hashable:
    """Returns the kind with most calls; in a tie, the former batch's, or else the first."""
    most = max(map(len, groups.values()))
    tied = [kind for kind, calls in groups.items() if len(calls) == most]
    return former if former in tied else tied[0]


def differs(function: str, caller: str, own: Parts, others: Parts) -> BatchError:
    """Returns the error of a call that differs from most of its batch."""
    own_shapes, other_shapes = shapes_of(own), shapes_of(others)
    how = "in the structure of its arguments" if own.structure != others.structure else ""
    return BatchError(
        f"the call of {function} by worker {caller!r} cannot be stacked with the others of its "
        f"batch{' as it differs ' + how if how else ''}: it has {own_shapes}, the others have "
        f"{other_shapes}. Send arguments of one shape, or see pad= and mixed= of batched",
        call=function,
        callers=(caller,),
        shapes=(own_shapes,),
    )


class Joined(NamedTuple):
    """The graph of a batch.

    Attributes:
        inputs: The stacked arguments that require grad.
        outputs: The tensors of the result that require grad.
        leaves: The other leaves behind the outputs, such as parameters.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    leaves: list[Tensor]


def graph_of(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Joined | None:
    """Returns the graph between stacked arguments and a result; None if there is none.

    Raises:
        AutogradError: The graph has nodes that callers cannot share.
    """
    tensors = {id(each): each for each in outputs if isinstance(each, Tensor)}
    ends = [each for each in tensors.values() if each.requires_grad]
    if not ends:
        return None
    starts = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    leaves = _leaves_behind(function, ends, starts)
    return Joined(starts, ends, leaves)


def _leaves_behind(function: str, ends: list[Tensor], starts: list[Tensor]) -> list[Tensor]:
    own = {id(each) for each in starts}
    seen: set[Node] = set()
    leaves: dict[int, Tensor] = {id(each): each for each in ends if each.is_leaf}
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
    for leaf in leaves.values():
        if leaf._backward_hooks and id(leaf) not in own:
            raise AutogradError(
                f"a leaf of shape {list(leaf.shape)} behind the result of {function} has a hook, "
                "which would be called twice in a pass through a batched call: use "
                "register_post_accumulate_grad_hook, or call a function that is not batched",
                operation=function,
            )
    return [leaf for key, leaf in leaves.items() if key not in own]


class _Shared(torch.autograd.Function):
    """The outputs for calls without gradients of their own: none leads to the inputs.

    Stands between the outputs and the leaves; can be differentiated any number of times.
    """

    @staticmethod
    def forward(ctx: Any, graph: Joined, *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        return tuple([each.detach() for each in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph: Joined = ctx.graph
        return None, *_pulled_back(graph, graph.leaves, gradients, torch.is_grad_enabled())


class _Own(torch.autograd.Function):
    """The row of one call, which leads to its own arguments and to the leaves."""

    @staticmethod
    def forward(
        ctx: Any, function: str, graph: Joined, row: int, columns: list[Tensor], *inputs: Tensor
    ) -> Any:
        """Returns the row; ``columns`` are the stacked arguments that have the first inputs."""
        ctx.set_materialize_grads(False)
        ctx.function, ctx.graph = function, graph
        # The tensors themselves would keep their graphs, and so form a circle with this node.
        ctx.row, ctx.columns = row, columns
        ctx.shapes = [each.shape for each in inputs[: len(columns)]]
        return tuple([each.detach()[row].clone() for each in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise AutogradError(
                f"second derivatives (create_graph=True) through a batched call of {ctx.function} "
                "are not supported if its arguments require grad; call a function that is not "
                "batched",
                operation=ctx.function,
            )
        graph, row = ctx.graph, ctx.row
        wide = list(_widened(graph.outputs, gradients, row))
        found = _pulled_back(graph, [*ctx.columns, *graph.leaves], wide, False)
        own = len(ctx.columns)
        rows = [
            None if each is None else each[row][region(shape)]
            for each, shape in zip(found[:own], ctx.shapes, strict=True)
        ]
        return None, None, None, None, *rows, *found[own:]


def _widened(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], row: int
) -> Iterator[Tensor | None]:
    """Yields gradients of whole outputs for those of one row; all others are zero."""
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None:
            yield None
        else:
            wide = torch.zeros_like(output)
            wide[row] = gradient
            yield wide


def _pulled_back(
    graph: Joined, targets: Sequence[Tensor], gradients: Sequence[Tensor | None], is_recorded: bool
) -> Sequence[Tensor | None]:
    """Returns the gradients of ``targets`` for gradients of the outputs; keeps the graph."""
    pairs = [pair for pair in zip(graph.outputs, gradients, strict=True) if pair[1] is not None]
    if not pairs or not targets:
        return [None] * len(targets)
    outputs, known = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs, targets, known, retain_graph=True, create_graph=is_recorded, allow_unused=True
    )


class Options(NamedTuple):
    """The arguments of ``batched``."""

    largest: int = 64
    smallest: int = 1
    longest_wait_s: float = 0.005
    limit: int = 4096
    pad: float | None = None
    mixed: bool = False
    isolate: bool = False


class Waiting(Protocol):
    """A call that can wait in a queue."""

    peer: Any
    context_id: int
    owned: Any

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends the call with its outcome."""

    def is_unwanted(self, now_s: float) -> bool:
        """Whether its caller no longer waits."""


class Keywords(dict[str, Any]):
    """The keyword arguments of a call, behind its positional ones."""


class Entry(NamedTuple):
    """A call in a queue.

    Attributes:
        call: Ends with its outcome.
        bound: The object whose method is called, or nothing.
        parts: The other arguments.
        arrived_s: When it was put into the queue.
        mark: The end of the GPU work that computes the arguments.
    """

    call: Waiting
    bound: tuple[Any, ...]
    parts: Parts
    arrived_s: float
    mark: Mark | None = None

    @property
    def caller(self) -> str:
        """Name of the worker that makes the call."""
        name: str = self.call.peer.name
        return name

    @property
    def stays_here(self) -> bool:
        """Whether the result is for this worker."""
        return self.call.owned is not None or self.call.peer.is_self


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
        self._is_padded = options.pad is not None
        self._former_kind: Any = None
        """The kind of the calls for which the function ran last, without an error."""

    def outcomes(self, entries: list[Entry]) -> list[Outcome]:
        """Returns the outcome of each call; never raises."""
        try:
            for entry in entries:
                if entry.mark is not None:
                    device_streams.use(entry.mark, entry.parts.leaves)
            return self._by_kind(entries)
        except BaseException as error:
            return [(None, error)] * len(entries)

    def _by_kind(self, entries: list[Entry]) -> list[Outcome]:
        if len(entries) < 2 or are_alike([entry.parts for entry in entries]):
            return self._run(entries)
        outcomes: dict[int, Outcome] = {}
        groups: dict[Hashable, list[int]] = {}
        for place, entry in enumerate(entries):
            groups.setdefault(kind_of(entry.parts, self._is_padded), []).append(place)
        most = usual(groups, self._former_kind)
        example = entries[groups[most][0]]
        for kind, places in groups.items():
            members = [entries[place] for place in places]
            if kind == most or self._options.mixed:
                found = self._run(members)
            else:
                found = [
                    (None, differs(self._name, each.caller, each.parts, example.parts))
                    for each in members
                ]
            outcomes.update(zip(places, found, strict=True))
        return [outcomes[place] for place in range(len(entries))]

    def _run(self, entries: list[Entry]) -> list[Outcome]:
        """Runs calls of one kind; with ``isolate``, by halves after an error."""
        try:
            return self._results(entries)
        except BaseException as error:
            if not self._options.isolate or len(entries) == 1:
                return self._failed(entries, error)
        middle = len(entries) // 2
        return self._run(entries[:middle]) + self._run(entries[middle:])

    def _failed(self, entries: list[Entry], error: BaseException) -> list[Outcome]:
        if len(entries) > 1 and hasattr(error, "add_note"):  # Python 3.10 has no notes.
            callers = first_names([entry.caller for entry in entries])
            error.add_note(f"in a batch of {len(entries)} calls of {self._name}, by {callers}")
        return [(None, error)] * len(entries)

    def _results(self, entries: list[Entry]) -> list[Outcome]:
        columns = list(zip(*[entry.parts.leaves for entry in entries], strict=True))
        stacked = stack(columns, self._options.pad)
        args = put_together(entries[0].parts.structure, stacked)
        kwargs = {}
        if args and type(args[-1]) is Keywords:
            *args, kwargs = args
        result = self._made(entries, args, kwargs)
        self._former_kind = kind_of(entries[0].parts, self._is_padded)
        graph = graph_of(self._name, stacked, result.leaves)
        if graph is not None:
            rows = self._rows_with_graphs(entries, columns, stacked, result, graph)
        else:
            rows = rows_of(result, len(entries))
        return [
            (_own_memory(row) if entry.stays_here else row, None)
            for entry, row in zip(entries, rows, strict=True)
        ]

    def _made(self, entries: list[Entry], args: Sequence[Any], kwargs: dict[str, Any]) -> Parts:
        """Calls the function with stacked arguments; returns its checked result."""
        run = partial(_outside_of_calls, self._function, *entries[0].bound, *args, **kwargs)
        carrier = None if self._worker is None else self._worker.carrier
        if carrier is None:
            made = run()
        else:
            made = carrier.run_batch([entry.call for entry in entries], self._function, run)
        result = take_apart(made)
        check_rows(result, len(entries), self._name, lambda: [entry.caller for entry in entries])
        if all(entry.call.context_id == NO_GRAD for entry in entries):
            leaves = [each.detach() if isinstance(each, Tensor) else each for each in result.leaves]
            return Parts(result.structure, leaves)
        return result

    def _rows_with_graphs(
        self,
        entries: list[Entry],
        columns: Sequence[Sequence[Any]],
        stacked: Sequence[Any],
        result: Parts,
        graph: Joined,
    ) -> list[Any]:
        rows = []
        apply_own: Any = _Own.apply
        apply_shared: Any = _Shared.apply
        shared: Sequence[Tensor] = ()
        for place, entry in enumerate(entries):
            own = [
                (each[place], joined)
                for each, joined in zip(columns, stacked, strict=True)
                if isinstance(each[place], Tensor) and each[place].requires_grad
            ]
            outputs: Sequence[Tensor]
            if entry.call.context_id == NO_GRAD:
                outputs = [each.detach()[place] for each in graph.outputs]
            elif own:
                tensors, own_columns = map(list, zip(*own, strict=True))
                outputs = apply_own(self._name, graph, place, own_columns, *tensors, *graph.leaves)
            else:
                shared = shared or apply_shared(graph, *graph.leaves)
                outputs = [each[place] for each in shared]
            with_graph = dict(zip(map(id, graph.outputs), outputs, strict=True))
            leaves = [
                with_graph[id(leaf)] if id(leaf) in with_graph else _row(leaf, place)
                for leaf in result.leaves
            ]
            rows.append(put_together(result.structure, leaves))
        return rows


def _row(leaf: Any, place: int) -> Any:
    return leaf[place] if isinstance(leaf, Tensor) else leaf


def _own_memory(value: Any) -> Any:
    """Returns a value that stays on this worker: it must not keep the memory of the batch."""
    structure, leaves = take_apart(value)
    copies = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
    return put_together(structure, copies)


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
