"""A backward pass that survives the loss of workers: it computes lost results again.

When a worker is lost, the graphs of the parts that it ran are gone, and the pass that needed them
has failed. But the values are on this worker, and the parts are pure functions: run again on other
workers, they give the same values with a new graph. This worker's own graph yields the gradient of
each result. So the pass runs in pieces: from the roots to the old results, then on from the new.

Rules of the file: Nothing of a failed attempt is kept. A pass that adds to gradients of leaves is
repeated only if every answer to a call that the roots lead to is the result of a map. A worker that
gave another answer may have kept gradients of the failed pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context, Gradients
from torchweft.autograd.engine import Engine
from torchweft.autograd.graph import InputGradients, Place, Roots, place_of, receives_before
from torchweft.errors import AutogradError, WorkerLost
from torchweft.mapreduce import trees

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
