"""Distributed autograd: records messages, and runs backward passes through all workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, overload

from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import accumulate
from torchweft.autograd.contexts import current_id, enter, set_current_id
from torchweft.autograd.engine import OpenContext, current_engine
from torchweft.autograd.graph import all_used, check_context_id, checked_inputs, roots_of
from torchweft.autograd.refusals import check_inside
from torchweft.autograd.replay import Replay, backward_into_grad, recompute_after_loss
from torchweft.engine.codec.tracebacks import shorten, without_own_frames
from torchweft.errors import ArgumentTypeError, AutogradError, ConfigurationError

__all__ = [
    "accumulate",
    "backward",
    "backward_into_grad",
    "context",
    "current_context_id",
    "get_gradients",
    "grad",
    "in_context",
    "is_available",
    "recompute_after_loss",
]


class context:
    """Opens a distributed autograd context for a ``with`` block, and yields its number.

    Within the block, the calls of this thread or task are recorded, and so are the calls that
    their callees make. The context is a context variable: ``asyncio`` tasks and
    ``asyncio.to_thread`` inherit it, and so does
    ``pool.submit(contextvars.copy_context().run, function)``. Calls of other threads are recorded
    outside of it; ``backward`` goes through them as well. The context has its own gradients on
    every worker that took part: concurrent contexts never mix, and gradients need no zeroing.
    On leaving the block, all workers release the context.

    Example::

        with torchweft.autograd.context() as context_id:
            loss = rpc.rpc_sync("server", forward, args=(batch,)).sum()
            torchweft.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    def __enter__(self) -> int:
        self._previous = current_id()
        self._open = OpenContext(current_engine())
        set_current_id(self._open.id)
        return self._open.id

    def __exit__(self, *failure: object) -> None:
        set_current_id(self._previous)
        self._open.end()


@overload
def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    create_graph: bool = False,
    grad_tensors: Sequence[Tensor | None] | None = None,
    mode: Literal["smart", "fast"] = "smart",
) -> None: ...


@overload
def backward(
    context_id: Tensor | Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    grad_tensors: Sequence[Tensor | None] | None = None,
) -> None: ...


def backward(
    context_id: int | Tensor | Sequence[Tensor],
    roots: Sequence[Tensor] | None = None,
    retain_graph: bool = False,
    *,
    create_graph: bool = False,
    grad_tensors: Sequence[Tensor | None] | None = None,
    mode: Literal["smart", "fast"] = "smart",
) -> None:
    """Backpropagates from ``roots`` through all workers that took part. Blocks until done.

    In a context, gradients of leaves are summed in the context, each on the worker where the leaf
    lives; ``.grad`` is not touched. Read them with ``get_gradients``, or pass the context to
    ``torchweft.optim.DistributedOptimizer.step``.

    Outside of any context, ``backward(loss)`` adds gradients to ``.grad`` of the leaves on all
    workers, as in one process. Results of calls keep their graphs for as long as they live. An
    argument that is a leaf arrives as a separate leaf. So gradients return for computed arguments,
    and reach the tensors that the functions use on their workers.

    Args:
        context_id: The context that receives the gradients. Or the roots, for the context that is
            open here, and for ``.grad`` if none is open.
        roots: Tensors of this worker that require grad; scalars if no gradient is given.
        retain_graph: Whether to keep the graphs for another pass.
        create_graph: Whether the gradients get a graph, through all workers, so that they can be
            differentiated in turn within the context. Keeps the graphs as well.
        grad_tensors: The gradient at each root; None means one, for a scalar.
        mode: Both names mean the same. Gradients are sent eagerly, as in the FAST mode of
            ``torch.distributed.autograd``; unused results are discovered where they keep
            gradients waiting. So the pass is correct for every program.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        ConfigurationError: ``create_graph`` outside of any context.
        AutogradError: A root is invalid, or the pass failed; names the worker and the operation.
        BackwardLost: A worker was lost, which is also a ``WorkerLost``.
        BackwardTimeout: The pass was not over after ``WEFT_BACKWARD_TIMEOUT_S``; names the workers
            that it waited for.
    """
    try:
        if mode not in ("smart", "fast"):
            raise ConfigurationError(f"mode is {mode!r}; it must be 'smart' or 'fast'")
        is_anywhere = roots is None
        if roots is None:
            roots, context_id = _only_roots(context_id), current_id()
        check_context_id(context_id)  # type: ignore[arg-type]
        engine = current_engine()
        how = PassMode(bool(retain_graph or create_graph), bool(create_graph))
        if context_id or not is_anywhere:
            engine.run(context_id, roots_of(roots, grad_tensors), how)  # type: ignore[arg-type]
        elif create_graph:
            raise ConfigurationError(
                "create_graph=True needs a context, in which the gradients have their graph: open "
                "`with torchweft.autograd.context() as context_id:` around the calls"
            )
        else:
            engine.run_into_grad(roots_of(roots, grad_tensors), how)
    except Exception as error:
        shorten(error)
        raise


def _only_roots(given: int | Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, Sequence):
        return given
    raise ArgumentTypeError(
        f"incompatible function arguments: backward({given!r}) has nothing to start from; write "
        "backward(context_id, [loss]) for a context, or backward(loss)"
    )


@without_own_frames
def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradients of tensors of this worker, through all workers. Blocks until done.

    Like ``torch.autograd.grad``, it adds nothing to ``.grad``, to the context or on another
    worker. So a remotely called function may use it in an inner loop, in the context of the call
    (see ``current_context_id``). If a worker is lost that ran parts of a map, they run again
    elsewhere, and the pass is repeated.

    Args:
        context_id: The context in which the outputs were computed.
        outputs: Tensors of this worker.
        inputs: Tensors of this worker that the outputs depend on, leaves or not.
        grad_outputs: The gradient at each output; None means one, for a scalar.
        retain_graph: Whether to keep the graphs for another pass; by default ``create_graph``.
            If not, it frees more than torch does: every part that may lead to an input.
        create_graph: Whether the gradients get a graph, through all workers, so that they can be
            differentiated in turn, to any order, within the context.
        allow_unused: Whether an input that no output depends on gets None instead of an error.

    Returns:
        A gradient for each input, of its shape, dtype and device; None for an unused input.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: An argument is invalid, an input was not used, or the pass failed; names
            the worker and the operation.
        BackwardLost: A worker was lost, which is also a ``WorkerLost``.
        BackwardTimeout: The pass was not over after ``WEFT_BACKWARD_TIMEOUT_S``; names the workers
            that it waited for.
    """
    check_context_id(context_id)
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    if isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs]
    engine = current_engine()
    roots = roots_of(outputs, grad_outputs, what="output")
    retain = create_graph if retain_graph is None else retain_graph
    mode = PassMode(bool(retain), bool(create_graph), for_inputs=True)
    wanted = checked_inputs(inputs)
    check_inside(engine, roots.edges, wanted)
    return all_used(Replay(engine, context_id, roots).gradients_of(wanted, mode), allow_unused)


def current_context_id() -> int:
    """Returns the number of the context that records the running code.

    In a function that another worker called, that is the context of the call.

    Raises:
        AutogradError: No context is open.
    """
    context_id = current_id()
    if not context_id:
        raise AutogradError(
            "no autograd context is open here: call this within `with "
            "torchweft.autograd.context()`, or in a function that was called from within one"
        )
    return context_id


def in_context(context_id: int) -> AbstractContextManager[None]:
    """Returns a ``with`` block in which this thread or task records into a context.

    For a thread that goes on with the work of another one. The block does not end the context: its
    opener does.

    Args:
        context_id: The number of an open context; 0 for none.
    """
    return enter(context_id)


@without_own_frames
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Returns the gradients that a context holds on this worker, by leaf tensor.

    Args:
        context_id: An open context.

    Returns:
        Each gradient has the shape, the dtype and the device of its leaf. A leaf that got none is
        not in the dict. Leaves of other workers are in the dicts there.

    Raises:
        AutogradError: There is no such context here.
    """
    check_context_id(context_id)
    engine = current_engine()
    return engine.contexts.get(context_id).get_gradients()


def is_available() -> bool:
    """Returns whether distributed autograd can be used: always True."""
    return True
