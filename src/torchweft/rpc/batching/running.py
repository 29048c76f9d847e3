"""Runs the function of a batch: stacks the arguments, splits the result, and tells who failed.

The graphs of the callers stay apart. To stack their tensors within one graph would fail: the pass
of one caller would reach the tensors of all others, and free the graph for them. So the function
runs on a detached stack, in a graph of its own. Each caller gets nodes that lead to its own
arguments and to the leaves behind the function. Their backward runs the batch's graph, which no
pass frees. See ``docs/protocols/batching.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.contexts import current_id, set_current_id
from torchweft.autograd.records import PLACEHOLDER
from torchweft.errors import AutogradError
from torchweft.rpc.batching import stacking
from torchweft.rpc.batching.stacking import Parts, named, put_together, region
from torchweft.rpc.worker import Worker
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.wire.messages import NO_GRAD
from torchweft.worker.calls import current_call


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


def shared_outputs(graph: Joined) -> list[Tensor]:
    """Returns the outputs for calls without gradients of their own; none leads to the inputs."""
    apply: Any = _Shared.apply
    return list(apply(graph, *graph.leaves))


class _Shared(torch.autograd.Function):
    """Stands between the outputs and the leaves; can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, graph: Joined, *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        return tuple([each.detach() for each in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph: Joined = ctx.graph
        return None, *_pulled_back(graph, graph.leaves, gradients, torch.is_grad_enabled())


class Own(NamedTuple):
    """What belongs to one call: its row, and its arguments that require grad.

    Attributes:
        row: Its place in the batch.
        tensors: These arguments.
        columns: For each of them, the stacked argument that it is part of.
    """

    row: int
    tensors: list[Tensor]
    columns: list[Tensor]


def own_outputs(function: str, graph: Joined, own: Own) -> list[Tensor]:
    """Returns the rows of a call, which lead to its own arguments and to the leaves."""
    apply: Any = _Own.apply
    return list(apply(function, graph, own, *own.tensors, *graph.leaves))


class _Own(torch.autograd.Function):
    """Stands between the rows of a call and its arguments."""

    @staticmethod
    def forward(ctx: Any, function: str, graph: Joined, own: Own, *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.graph = function, graph
        # The tensors themselves would keep their graphs, and so form a circle with this node.
        ctx.row, ctx.columns = own.row, own.columns
        ctx.shapes = [each.shape for each in own.tensors]
        return tuple([each.detach()[own.row].clone() for each in graph.outputs])

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
        return None, None, None, *rows, *found[own:]


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
        if len(entries) < 2:
            return self._run(entries)
        if stacking.are_alike([entry.parts for entry in entries]):
            return self._run(entries)
        kinds = [stacking.kind_of(entry.parts, self._is_padded) for entry in entries]
        usual = stacking.majority(kinds, self._former_kind)
        if kinds.count(usual) == len(kinds):
            return self._run(entries)
        outcomes: dict[int, Outcome] = {}
        groups: dict[Any, list[int]] = {}
        for place, kind in enumerate(kinds):
            groups.setdefault(kind, []).append(place)
        example = entries[groups[usual][0]]
        for kind, places in groups.items():
            members = [entries[place] for place in places]
            if kind == usual or self._options.mixed:
                found = self._run(members)
            else:
                found = [
                    (None, stacking.differs(self._name, each.caller, each.parts, example.parts))
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
            callers = named([entry.caller for entry in entries])
            error.add_note(f"in a batch of {len(entries)} calls of {self._name}, by {callers}")
        return [(None, error)] * len(entries)

    def _results(self, entries: list[Entry]) -> list[Outcome]:
        columns = list(zip(*[entry.parts.leaves for entry in entries], strict=True))
        stacked = stacking.stack(columns, self._options.pad)
        args = put_together(entries[0].parts.structure, stacked)
        kwargs = {}
        if args and type(args[-1]) is Keywords:
            *args, kwargs = args
        result = self._made(entries, args, kwargs)
        self._former_kind = stacking.kind_of(entries[0].parts, self._is_padded)
        graph = graph_of(self._name, stacked, result.leaves)
        if graph is not None:
            rows = self._rows_with_graphs(entries, columns, stacked, result, graph)
        else:
            rows = stacking.rows_of(result, len(entries))
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
        result = stacking.take_apart(made)
        stacking.check_rows(
            result, len(entries), self._name, lambda: [entry.caller for entry in entries]
        )
        if all(entry.call.context_id == NO_GRAD for entry in entries):
            return stacking.detached(result)
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
        shared: Sequence[Tensor] = ()
        for place, entry in enumerate(entries):
            own = _own(place, columns, stacked)
            outputs: Sequence[Tensor]
            if entry.call.context_id == NO_GRAD:
                outputs = [each.detach()[place] for each in graph.outputs]
            elif own.tensors:
                outputs = own_outputs(self._name, graph, own)
            else:
                shared = shared or shared_outputs(graph)
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


def _own(place: int, columns: Sequence[Sequence[Any]], stacked: Sequence[Any]) -> Own:
    tensors, own_columns = [], []
    for column, joined in zip(columns, stacked, strict=True):
        tensor = column[place]
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensors.append(tensor)
            own_columns.append(joined)
    return Own(place, tensors, own_columns)


def _own_memory(value: Any) -> Any:
    """Returns a value that stays on this worker: it must not keep the memory of the batch."""
    structure, leaves = stacking.take_apart(value)
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
