"""Backward passes that compute lost tensors again, where a component says how.

When a worker is lost, the graphs of what it computed are gone, and the pass that needed them has
failed. But the values are on this worker, and another worker can compute them once more: that
gives the same values with a new graph. This worker's own graph yields the gradient of each old
tensor. So the pass runs in pieces: from the roots to the old tensors, then on from the new.

Nothing of a failed attempt is kept. A pass that adds to gradients of leaves is repeated only if
every answer to a call that the roots lead to can be computed again. A worker that gave another
answer may have kept gradients of the failed pass.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context, Gradients, add_to_grad, current_id
from torchweft.autograd.engine import Engine, current_engine
from torchweft.autograd.graph import (
    InputGradients,
    Place,
    Roots,
    check_context_id,
    checked_inputs,
    place_of,
    receives_before,
    roots_of,
)
from torchweft.errors import AutogradError, WorkerLost

T = TypeVar("T")
Again = Callable[[], Sequence[Tensor]]

_log = logging.getLogger("torchweft")


class Recomputable:
    """Tensors of a context, and the means to compute them again.

    Args:
        tensors: They require grad; only their places in the graph are kept.
        again: Returns equal tensors with a new graph, from the workers that are left. May block.
    """

    def __init__(self, tensors: Sequence[Tensor], again: Again) -> None:
        self._places = [[place_of(tensor) for tensor in tensors]]
        self._latest: Sequence[Tensor] = []
        self._again = again

    @property
    def places(self) -> set[Place]:
        """The places in the graph of the tensors of all runs."""
        return {place for places in self._places for place in places}

    def compute_again(self) -> None:
        """Computes the tensors again. Blocks."""
        self._latest = self._again()
        self._places.append([place_of(tensor) for tensor in self._latest])

    @property
    def replaced(self) -> dict[Place, Tensor]:
        """The latest tensors, by the places of earlier ones."""
        return {
            place: tensor
            for places in self._places[:-1]
            for place, tensor in zip(places, self._latest, strict=True)
        }


def recompute_after_loss(tensors: Sequence[Tensor], again: Again) -> None:
    """Has backward passes through the open context compute tensors again if a worker is lost.

    Those passes are ``torchweft.autograd.grad`` and ``backward_into_grad``. Without an open context
    there is nothing to do.

    Args:
        tensors: Tensors of this worker that require grad, and lead to other workers.
        again: Returns equal tensors in the same order, with a new graph that avoids lost workers.
            It runs in the thread that makes the pass, and may block.
    """
    with contextlib.suppress(AutogradError):  # The program has left the context.
        current_engine().contexts.get(current_id()).recomputable.append(
            Recomputable(tensors, again)
        )


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
            retains_here=bool(self._context().recomputable),
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
                    "worker %r was lost in a backward pass; what it computed is computed again, "
                    "and the pass is repeated",
                    worker,
                )
            for each in list(self._context().recomputable):
                each.compute_again()

    def _replaced(self) -> dict[Place, Tensor]:
        """Returns replacements for tensors whose workers were lost, in this pass or before.

        A graph that was recorded before the loss, or in the pass that noticed it, leads to the old
        tensors.
        """
        replaced: dict[Place, Tensor] = {}
        for each in self._context().recomputable:
            # Also tensors that this worker computed: their graph may lead through other workers.
            replaced.update(each.replaced)
        return replaced

    def _is_repeatable(self, mode: PassMode) -> bool:
        """Whether a failed attempt has left nothing behind, and a repetition could help.

        A pass for inputs leaves nothing anywhere. Any other pass may have added to gradients of
        other workers' leaves.
        """
        context = self._context()
        if mode.for_inputs or not context.recomputable:
            return bool(context.recomputable)
        nodes = {node for each in context.recomputable for node, _ in each.places}
        return all(
            not receive.is_answer or not nodes.isdisjoint(receive.nodes)
            for receive in receives_before(context, self._roots)
        )


def _lost_worker(error: BaseException) -> str | None:
    """Returns the name of the worker whose loss ended a pass; None if it had another cause."""
    cause = error.__cause__
    if isinstance(cause, WorkerLost):
        return cause.worker or ""
    return None if cause is None else _lost_worker(cause)


def backward_into_grad(
    context_id: int,
    roots: Sequence[Tensor],
    grad_tensors: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Tensor | Iterable[Tensor] | None = None,
) -> None:
    """Runs a pass as ``torchweft.autograd.backward``, and adds to ``.grad`` as well. Blocks.

    The gradients of this worker's leaves are in the context and in ``.grad``, where a local
    optimizer finds them; those of other workers' leaves are in the context there. If a worker is
    lost meanwhile, the pass is repeated with what ``recompute_after_loss`` was given. That requires
    that every answer to a call that ``roots`` lead to can be computed again, or ``inputs``.

    Args:
        context_id: The context.
        roots: Tensors of this worker that require grad.
        grad_tensors: The gradient at each root; None means one, for a scalar.
        retain_graph: Whether to keep the graphs for another pass.
        create_graph: Whether the gradients have a graph.
        inputs: Leaves of this worker; if given, no other tensor gets a gradient anywhere.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, or the pass failed. ``.grad`` is unchanged.
    """
    check_context_id(context_id)
    engine = current_engine()
    started = roots_of(roots, grad_tensors)
    mode = PassMode(retain_graph or create_graph, create_graph)
    replay = Replay(engine, context_id, started)
    if inputs is None:
        gradients: Mapping[Tensor, Tensor] = replay.gradients_of_leaves(mode)
    else:
        wanted = _checked_leaves(inputs)
        found = replay.gradients_of(wanted, mode._replace(for_inputs=True))
        pairs = [(leaf, each) for leaf, each in zip(wanted, found, strict=True) if each is not None]
        gradients = _in_memory_of_their_own(pairs, started, create_graph)
    with torch.set_grad_enabled(create_graph):
        engine.contexts.get(context_id).gradients.keep(gradients)
    # The context owns these gradients, and .grad is changed in place: it gets copies.
    add_to_grad(gradients.items(), gradients.values(), create_graph)


def _checked_leaves(inputs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    checked = checked_inputs(inputs)
    for place, tensor in enumerate(checked):
        if not tensor.is_leaf:
            raise AutogradError(
                f"inputs[{place}], of shape {tuple(tensor.shape)}, is no leaf and has no .grad to "
                "add to; use torchweft.autograd.grad, which returns its gradient"
            )
    return list(dict.fromkeys(checked))


def _in_memory_of_their_own(
    pairs: Iterable[tuple[Tensor, Tensor]], roots: Roots, create_graph: bool
) -> Mapping[Tensor, Tensor]:
    """Returns gradients that share no memory with each other or with the program.

    A found gradient may be shared by several tensors, be an argument of the program, or be an
    expanded scalar.
    """
    gradients = Gradients()
    with torch.set_grad_enabled(create_graph):
        gradients.add_all(pairs, borrowed=roots.gradients)
    return gradients.snapshot()
