"""All-reduces of gradients that end when a worker is lost, rather than at the group's timeout.

A trainer that has noticed the loss of a server makes no further pass, and another one may wait for
it in an all-reduce. That wait is in C++, and nothing in the process group ends it. So a backward
pass first waits here, for the all-reduces or a loss, and then leaves the rest to DDP.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection
from typing import Any

from torch import distributed
from torch.autograd import Variable

from torchweft.embedding.named import tell_losses
from torchweft.embedding.recovery import is_there
from torchweft.errors import WorkerLost


class Reductions:
    """The all-reduces of one model on the CPU; a backward pass raises the loss of a worker.

    Args:
        group: The process group; None for the default one.
        averages: Whether gradients are averaged, rather than summed.
        workers: Names of servers and trainers, whose loss ends a pass.
    """

    def __init__(self, group: Any, workers: Collection[str], *, averages: bool) -> None:
        self._group = group
        self._factor = 1.0 / distributed.get_world_size(group) if averages else None
        self._workers = frozenset(workers)
        self._changed = threading.Condition()
        self._open = 0
        self._lost: WorkerLost | None = None
        tell_losses(self)

    def reduce(self, bucket: Any) -> Any:
        """Reduces the gradients of a bucket; the future has them. A hook of DDP."""
        gradients = bucket.buffer()
        if self._factor is not None:
            gradients.mul_(self._factor)  # As DDP itself does it, to the same bits.
        self._raise_loss()
        work = distributed.all_reduce(gradients, group=self._group, async_op=True)
        future = work.get_future()
        if gradients.device.type == "cpu":
            # The first one of a pass: an error elsewhere in the former pass makes no difference.
            self._note(future, is_first=bucket.index() == 0)
        return future.then(lambda done: done.value()[0])

    def _note(self, future: Any, *, is_first: bool) -> None:
        with self._changed:
            self._open += 1
        future.add_done_callback(lambda _: self._end())
        if is_first:
            # Before DDP's own callback, which it queues with the last bucket.
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._wait)

    def _end(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        """Waits for all-reduces, whose limit is that of the process group, or for a loss."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._lost is not None)
        self._raise_loss()

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
