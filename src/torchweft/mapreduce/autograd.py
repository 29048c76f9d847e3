"""Distributed autograd with the interface of ``torch.autograd``: ``backward`` and ``grad``.

``torchweft.autograd.backward`` leaves gradients in the context. ``backward`` here also adds the
gradients of this worker's tensors to ``.grad``, so that a local optimizer can step them. Both
functions survive the loss of workers that ran parts of a map; see ``Replay``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchweft.autograd import context, current_context_id, get_gradients, is_available
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context, Gradients, add_to_grad
from torchweft.autograd.contexts import Context as DistAutogradContext
from torchweft.autograd.engine import Engine, current_engine
from torchweft.autograd.graph import (
    InputGradients,
    Place,
    Roots,
    all_used,
    check_context_id,
    checked_inputs,
    place_of,
    receives_before,
    roots_of,
)
from torchweft.errors import AutogradError, WorkerLost
from torchweft.mapreduce import trees

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "current_context_id",
    "get_gradients",
    "grad",
    "is_available",
]

Gradient = Tensor | Sequence[Tensor | None] | None


def backward(
    context_id: int,
    tensors: Tensor | Iterable[Tensor],
    grad_tensors: Gradient | bool = None,
    retain_graph: bool | None = None,
    inputs: Tensor | Iterable[Tensor] | None = None,
    *,
    create_graph: bool = False,
) -> None:
    """Backpropagates through all workers, into ``.grad`` of this worker's tensors. Blocks.

    Works as ``torch.autograd.backward``. The gradients are in the context as well
    (``get_gradients``); gradients of other workers' tensors are in the context on those workers.

    If a worker is lost meanwhile, the parts of the context's maps run again on the remaining
    workers, and the pass is repeated. That requires that every answer to a call on which
    ``tensors`` depend is the result of a map, or that ``inputs`` is given. The graph of this
    worker is kept until the context ends for this purpose.

    Args:
        context_id: The context in which the tensors were computed.
        tensors: Tensors of this worker that require grad; scalars, if no gradient is given.
        grad_tensors: The gradient at each of ``tensors``. A bool in this position is taken for
            ``retain_graph``, which is third in ``torchopt.distributed``.
        retain_graph: Whether to keep the graphs for another pass; by default ``create_graph``.
        inputs: Leaves of this worker; if given, no other tensor gets a gradient, on this or
            another worker.
        create_graph: Whether the gradients have a graph.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, or the pass failed; names the worker and the
            operation. ``.grad`` is unchanged.
    """
    grad_tensors, retain_graph = _in_order(grad_tensors, retain_graph)
    check_context_id(context_id)
    wanted = None if inputs is None else _checked_leaves(inputs)
    roots = _roots_of(tensors, grad_tensors, "root")
    mode = _mode_of(retain_graph, create_graph)
    replay = Replay(current_engine(), context_id, roots)
    if wanted is not None:
        found = replay.gradients_of(wanted, mode._replace(for_inputs=True))
        gradients = _owned(zip(wanted, found, strict=True), roots, create_graph)
    else:
        gradients = replay.gradients_of_leaves(mode)
    with torch.set_grad_enabled(create_graph):
        current_engine().contexts.get(context_id).gradients.keep(gradients)
    # The context owns these gradients, and .grad is changed in place: it gets copies.
    add_to_grad(gradients.items(), gradients.values(), create_graph)


def grad(
    context_id: int,
    outputs: Tensor | Iterable[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Gradient | bool = None,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
    *,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradients of tensors of this worker, through all workers. Blocks until done.

    Works as ``torchweft.autograd.grad``; but if a worker is lost meanwhile, the parts of the
    context's maps run again on other workers, as in ``backward``. Nothing is accumulated anywhere,
    so a repeated call returns the same gradients.

    Args:
        context_id: The context in which the outputs were computed.
        outputs: Tensors of this worker.
        inputs: Tensors of this worker that the outputs depend on, leaves or not.
        grad_outputs: The gradient at each output. A bool in this position is taken for
            ``retain_graph``, which is fourth in ``torchopt.distributed``.
        retain_graph: Whether to keep the graphs for another pass; by default ``create_graph``.
        allow_unused: Whether the gradient of an input that no output depends on may be None.
        create_graph: Whether the gradients have a graph, through all workers.

    Returns:
        A gradient for each input.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, an input was not used, or the pass failed.
    """
    if isinstance(grad_outputs, bool) and isinstance(retain_graph, bool):
        allow_unused, retain_graph = retain_graph, None
    grad_outputs, retain_graph = _in_order(grad_outputs, retain_graph)
    check_context_id(context_id)
    wanted = checked_inputs(inputs)
    roots = _roots_of(outputs, grad_outputs, "output")
    mode = _mode_of(retain_graph, create_graph)
    replay = Replay(current_engine(), context_id, roots)
    found = replay.gradients_of(wanted, mode._replace(for_inputs=True))
    return all_used(found, allow_unused)


def _in_order(
    gradients: Gradient | bool, retain_graph: bool | None
) -> tuple[Gradient, bool | None]:
    """Returns both arguments in our order; torchopt passes ``retain_graph`` in the first place."""
    return (None, gradients) if isinstance(gradients, bool) else (gradients, retain_graph)


def _mode_of(retain_graph: bool | None, create_graph: bool) -> PassMode:
    retain_graph = create_graph if retain_graph is None else retain_graph
    return PassMode(bool(retain_graph), bool(create_graph))


def _roots_of(tensors: Tensor | Iterable[Tensor], gradients: Gradient, what: str) -> Roots:
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    return roots_of(tensors, gradients, what=what)


def _checked_leaves(inputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    checked = checked_inputs(inputs)
    for place, tensor in enumerate(checked):
        if not tensor.is_leaf:
            raise AutogradError(
                f"inputs[{place}], of shape {tuple(tensor.shape)}, is no leaf and has no .grad to "
                "add to; use torchweft.mapreduce.autograd.grad, which returns its gradient"
            )
    return list(dict.fromkeys(checked))


def _owned(
    found: Iterable[tuple[Tensor, Tensor | None]], roots: Roots, create_graph: bool
) -> Mapping[Tensor, Tensor]:
    """Returns the gradients that are not None, each in memory of its own.

    A found gradient may be shared by several tensors, be an argument of the program, or be an
    expanded scalar.
    """
    pairs = [(tensor, gradient) for tensor, gradient in found if gradient is not None]
    gradients = Gradients()
    with torch.set_grad_enabled(create_graph):
        gradients.add_all(pairs, borrowed=roots.gradients)
    return gradients.snapshot()


# A backward pass that computes lost results again
#
# When a worker is lost, the graphs of the parts that it ran are gone, and the pass that needed them
# has failed. But the values are on this worker, and the parts are pure functions: run again on
# other workers, they give the same values with a new graph. This worker's own graph yields the
# gradient of each result. So the pass runs in pieces: from the roots to the old results, then on
# from the new.
#
# Nothing of a failed attempt is kept. A pass that adds to gradients of leaves is repeated only if
# every answer to a call that the roots lead to is the result of a map. A worker that gave another
# answer may have kept gradients of the failed pass.


T = TypeVar("T")

_log = logging.getLogger("torchweft")


class Repeatable(Protocol):
    """Results of this worker that can be computed again."""

    def run_again(self) -> Sequence[Any]:
        """Returns equal results with a new graph, from the remaining workers. Blocks."""
        ...


class Results:
    """The results of a map in a context, and the means to compute them again.

    Args:
        results: The results of its parts; only the tensors' places in the graph are kept.
        source: Computes the results again.
    """

    def __init__(self, results: Sequence[Any], source: Repeatable) -> None:
        self._places = [_places_of(_differentiable(results))]
        self._latest: list[Tensor] = []
        self._source = source

    @property
    def places(self) -> set[Place]:
        """The places of the results in the graph, of all runs."""
        return {place for places in self._places for place in places}

    def compute_again(self) -> None:
        """Computes the results again."""
        self._latest = _differentiable(self._source.run_again())
        self._places.append(_places_of(self._latest))

    @property
    def replaced(self) -> dict[Place, Tensor]:
        """The latest results, by the places of earlier results."""
        return {
            place: tensor
            for places in self._places[:-1]
            for place, tensor in zip(places, self._latest, strict=True)
        }


def _places_of(tensors: Sequence[Tensor]) -> list[Place]:
    return [place_of(tensor) for tensor in tensors]


def _differentiable(results: Sequence[Any]) -> list[Tensor]:
    leaves = trees.leaves(list(results))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


class Replay:
    """A backward pass from roots, repeated as often as workers are lost.

    Args:
        engine: Runs the pieces.
        context_id: The context.
        roots: Where the pass starts.
    """

    def __init__(self, engine: Engine, context_id: int, roots: Roots) -> None:
        self._engine = engine
        self._context_id = context_id
        self._roots = roots

    def gradients_of_leaves(self, mode: PassMode) -> dict[Tensor, Tensor]:
        """Returns the gradients of the leaves of this worker."""

        def attempt(replaced: dict[Place, Tensor]) -> dict[Tensor, Tensor]:
            gradients = Gradients()
            input_gradients = InputGradients(self._context(), (), replaced, for_inputs=False)
            self._run_all(mode, input_gradients, gradients)
            return gradients.snapshot()

        return self._until_done(attempt, mode)

    def gradients_of(self, inputs: Sequence[Tensor], mode: PassMode) -> list[Tensor | None]:
        """Returns the gradients of tensors of this worker; ``mode`` is for inputs."""

        def attempt(replaced: dict[Place, Tensor]) -> list[Tensor | None]:
            input_gradients = InputGradients(self._context(), inputs, replaced)
            self._run_all(mode, input_gradients)
            return input_gradients.results()

        return self._until_done(attempt, mode)

    def _context(self) -> Context:
        return self._engine.contexts.get(self._context_id)

    def _run_all(
        self, mode: PassMode, input_gradients: InputGradients, gradients: Gradients | None = None
    ) -> None:
        self._engine.run(
            self._context_id,
            self._roots,
            mode,
            gradients=gradients,
            input_gradients=input_gradients,
            retains_here=bool(self._context().maps),
        )

    def _until_done(self, attempt: Callable[[dict[Place, Tensor]], T], mode: PassMode) -> T:
        lost: set[str] = set()
        while True:
            try:
                return attempt(self._replaced())
            except AutogradError as error:
                worker = _lost_worker(error)
                if worker is None or worker in lost or not self._is_repeatable(mode):
                    raise
                lost.add(worker)
                _log.warning(
                    "worker %r was lost in a backward pass; the parts of %d maps run again on "
                    "others, and the pass is repeated",
                    worker,
                    len(self._context().maps),
                )
            for results in list(self._context().maps):
                results.compute_again()

    def _replaced(self) -> dict[Place, Tensor]:
        """Returns replacements for results whose workers were lost, in this pass or before.

        A graph that was recorded before the loss, or in the pass that noticed it, leads to the old
        results.
        """
        replaced: dict[Place, Tensor] = {}
        for results in self._context().maps:
            # Also results of this worker's own parts: their graph may lead through other workers.
            replaced.update(results.replaced)
        return replaced

    def _is_repeatable(self, mode: PassMode) -> bool:
        """Whether a failed attempt has left nothing behind, and there are maps to run again.

        A pass for inputs leaves nothing anywhere. Any other pass may have added to gradients of
        other workers' leaves. Parts of maps have no leaves of their own.
        """
        context = self._context()
        if mode.for_inputs or not context.maps:
            return bool(context.maps)
        nodes = {node for results in context.maps for node, _ in results.places}
        receives = receives_before(context, self._roots)
        return all(
            not receive.is_answer or not nodes.isdisjoint(receive.nodes) for receive in receives
        )


def _lost_worker(error: BaseException) -> str | None:
    """Returns the name of the worker whose loss ended a pass; None if it had another cause."""
    cause = error.__cause__
    if isinstance(cause, WorkerLost):
        return cause.worker or ""
    return None if cause is None else _lost_worker(cause)
