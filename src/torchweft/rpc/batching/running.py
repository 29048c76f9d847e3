"""Runs the function of a batch: stacks the arguments, splits the result, and tells who failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchweft.autograd.contexts import current_id, set_current_id
from torchweft.rpc.batching import stacking
from torchweft.rpc.batching.gradients import Joined, Own, graph_of, own_outputs, shared_outputs
from torchweft.rpc.batching.stacking import Parts, named, put_together
from torchweft.rpc.worker import Worker
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.wire.messages import NO_GRAD
from torchweft.worker.calls import current_call


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
                found = [(None, self._differs(each, example)) for each in members]
            outcomes.update(zip(places, found, strict=True))
        return [outcomes[place] for place in range(len(entries))]

    def _differs(self, entry: Entry, example: Entry) -> BaseException:
        return stacking.differs(self._name, entry.caller, entry.parts, example.parts)

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
