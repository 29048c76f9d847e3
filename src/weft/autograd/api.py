"""What users call: ``context``, ``backward`` and ``get_gradients``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from torch import Tensor

from weft.agent.current import current
from weft.autograd.contexts import current_id, set_current_id
from weft.autograd.engine import Engine
from weft.errors import ArgumentTypeError, ConfigurationError


class context:
    """Opens a distributed autograd context for a ``with`` block, and yields its number.

    Within the block, calls of this thread, and what the callees call in turn, are recorded.
    ``backward`` goes along them. The context has gradients of its own, on every worker that took
    part: contexts that run side by side never mix, and nothing has to be set to zero. On leaving
    the block, all workers let go of it.

    Example::

        with weft.autograd.context() as context_id:
            loss = rpc.rpc_sync("server", forward, args=(batch,)).sum()
            weft.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    def __enter__(self) -> int:
        self._engine: Engine = current().part(Engine)
        self._id = self._engine.contexts.open()
        self._previous = current_id()
        set_current_id(self._id)
        return self._id

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_current_id(self._previous)
        self._engine.release(self._id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    mode: Literal["smart", "fast"] = "smart",
) -> None:
    """Backpropagates from ``roots`` through all workers that took part. Blocks until done.

    Gradients of leaves are added up in the context, each on the worker where the leaf lives;
    ``.grad`` is not touched. Read them with ``get_gradients``, or pass the context to
    ``weft.optim.DistributedOptimizer.step``.

    Args:
        context_id: The context in which the roots were computed.
        roots: Scalar tensors of this worker that require grad.
        retain_graph: Whether to keep the graphs for another pass over the same context.
        mode: Either name means the same: gradients go ahead as in the FAST mode of
            ``torch.distributed.autograd``, and results that were not used are found out where
            they keep gradients waiting, so that it is right for every program.

    Raises:
        ArgumentTypeError: An argument is of the wrong type.
        AutogradError: A root cannot be one, or the pass failed; names the worker and the operation.
    """
    if mode not in ("smart", "fast"):
        raise ConfigurationError(f"mode is {mode!r}; it must be 'smart' or 'fast'")
    try:
        operator.index(context_id)
    except TypeError as error:
        raise ArgumentTypeError(
            "incompatible function arguments: the first must be the number of an autograd context, "
            f"not a {type(context_id).__name__}"
        ) from error
    engine: Engine = current().part(Engine)
    engine.backward(context_id, roots, retain_graph=retain_graph)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Returns the gradients that a context holds on this worker, by leaf tensor.

    Args:
        context_id: A context that is open.

    Raises:
        AutogradError: There is no such context here.
    """
    engine: Engine = current().part(Engine)
    return engine.contexts.get(context_id).get_gradients()
