"""Collectives of DDP that end when a worker is lost or a trainer stays away.

A trainer that has noticed the loss of a server makes no further pass, and another one may wait for
it in an all-reduce. So may a trainer that has more batches than another one. That wait is in C++,
and nothing in the process group ends it before its timeout. So a backward pass first waits here,
for the all-reduces, a loss or the limit of the model, and then leaves the rest to DDP. A forward
pass waits here for the buffers of the first trainer.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from torchweft.arguments import kind_of
from torchweft.embedding.meeting import tell_losses
from torchweft.embedding.recovery import is_there
from torchweft.errors import ArgumentTypeError, ConfigurationError, WorkerLost
from torchweft.hybrid.missing import Turns, is_timeout

Hook = Callable[[Any, Any], Any]
"""A communication hook of DDP: takes a state and a bucket of gradients, returns a future."""


class Reducer(NamedTuple):
    """A user's way to reduce gradients.

    Attributes:
        hook: Reduces the gradients of a bucket.
        state: The first argument of the hook.
    """

    hook: Hook
    state: Any = None

    @property
    def name(self) -> str:
        """The name of the hook, by which trainers compare it."""
        named = self.hook if hasattr(self.hook, "__qualname__") else type(self.hook)
        return f"{named.__module__}.{named.__qualname__}"

    def __call__(self, bucket: Any) -> Any:
        """Returns the future of the reduced gradients.

        Raises:
            ArgumentTypeError: The hook returned something else.
        """
        future = self.hook(self.state, bucket)
        # The base of torch.futures.Future: process groups return it as it is.
        if not isinstance(future, torch._C.Future):
            raise ArgumentTypeError(
                f"comm_hook {self.name} returned {kind_of(future)}; return a "
                "torch.futures.Future with the reduced gradients of the bucket"
            )
        return future


def reducer_of(hook: Hook | None, state: Any, replicas: Sequence[str]) -> Reducer | None:
    """Returns a user's way to reduce gradients; None if there is none.

    Args:
        hook: The hook.
        state: Its state.
        replicas: The modules that are each replicated; none for the whole model.

    Raises:
        ArgumentTypeError: The hook cannot be called.
        ConfigurationError: There is a state without a hook, or one state for several replicas.
    """
    if hook is None:
        if state is not None:
            raise ConfigurationError("comm_state is passed without comm_hook, which would take it")
        return None
    if not callable(hook):
        raise ArgumentTypeError(
            f"comm_hook is {kind_of(hook)}; pass a function of a state and a bucket, as for "
            "register_comm_hook of DistributedDataParallel"
        )
    if state is not None and len(replicas) > 1:
        raise ConfigurationError(
            f"comm_state is one for the replicas {list(replicas)}, and buckets of each have the "
            "same numbers; pass a comm_hook without a state, or replicate one module"
        )
    return Reducer(hook, state)


class Reductions:
    """The all-reduces of one model on the CPU; a backward pass raises the loss of a worker.

    Args:
        group: The process group; None for the default one.
        averages: Whether gradients are averaged, rather than summed.
        workers: Names of servers and trainers, whose loss ends a pass.
        turns: Counts the collectives, and says who is missing.
        reducer: Reduces the gradients, in place of an all-reduce of them.
    """

    def __init__(
        self,
        group: Any,
        workers: Collection[str],
        turns: Turns,
        *,
        averages: bool,
        reducer: Reducer | None = None,
    ) -> None:
        self._group = group
        self._reducer = reducer
        self._factor = 1.0 / distributed.get_world_size(group) if averages else None
        self._workers = frozenset(workers)
        self._turns = turns
        self._failed: Exception | None = None
        """The error of a collective that has failed since the last wait."""
        self._changed = threading.Condition()
        self._open = 0
        self._lost: WorkerLost | None = None
        tell_losses(self)

    def reduce(self, bucket: Any) -> Any:
        """Reduces the gradients of a bucket; the future has them. A hook of DDP."""
        self._raise_loss()
        is_on_cpu = bucket.buffer().device.type == "cpu"
        # The first one of a pass: an error elsewhere in the former pass makes no difference.
        is_first = bucket.index() == 0
        began_s = self._turns.begin() if is_first else 0.0
        future = self._all_reduced(bucket) if self._reducer is None else self._reducer(bucket)
        if is_on_cpu:
            self._note(future)
            if is_first:
                # Before DDP's own callback, which it queues with the last bucket.
                engine: Any = Variable._execution_engine
                engine.queue_callback(
                    lambda: self._wait("the all-reduce of a backward pass", began_s)
                )
        return future

    def broadcast(self, buffers: Mapping[str, Tensor]) -> None:
        """Gives buffers the values of the first trainer. A hook of DDP, in forward passes."""
        self._raise_loss()
        began_s = self._turns.begin()
        source = 0 if self._group is None else distributed.get_global_rank(self._group, 0)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for each in buffers.values():
            by_type.setdefault(each.dtype, []).append(each)
        for tensors in by_type.values():
            joined = torch.cat([each.reshape(-1) for each in tensors])
            work: Any = distributed.broadcast(joined, source, group=self._group, async_op=True)
            future = work.get_future()
            self._note(future)
            self._wait("the broadcast of buffers in a forward pass", began_s)
            future.wait()
            if distributed.get_rank() != source:
                parts = torch.split(joined, [each.numel() for each in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def _all_reduced(self, bucket: Any) -> Any:
        gradients = bucket.buffer()
        if self._factor is not None:
            gradients.mul_(self._factor)  # As DDP itself does it, to the same bits.
        work = distributed.all_reduce(gradients, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _note(self, future: Any) -> None:
        with self._changed:
            self._open += 1
        future.add_done_callback(self._end)

    def _end(self, future: Any) -> None:
        try:
            future.value()
            error = None
        except Exception as raised:
            error = raised
        with self._changed:
            self._failed = self._failed or error
            self._open -= 1
            self._changed.notify_all()

    def _wait(self, what: str, began_s: float) -> None:
        """Waits for the open collectives, a loss, or until the model's time is up."""
        limit_s = self._turns.limit_s
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: not self._open or self._lost is not None,
                None if math.isinf(limit_s) else limit_s,
            )
            failed, self._failed = self._failed, None
        self._raise_loss()
        if not is_over or is_timeout(failed):
            raise self._turns.missing(what, began_s) from failed

    def _raise_loss(self) -> None:
        if self._lost is not None:
            raise copy.copy(self._lost)

    def worker_lost(self, error: WorkerLost) -> None:
        """Ends the passes that wait."""
        # Told, too, are the losses of those who had a name before.
        if error.worker in self._workers and not is_there(error.worker):
            with self._changed:
                self._lost = self._lost or error
                self._changed.notify_all()
