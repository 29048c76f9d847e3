"""The trainers of a model: ranks of a process group, their names as workers, and their collectives.

A process group names nobody, and nothing in it ends a wait before its timeout. So each trainer
counts the collectives of its models, and a trainer that has waited too long asks the others how
many they have begun. A trainer that has noticed the loss of a server makes no further pass, and
another one may wait for it in an all-reduce, as may one that has more batches. So a backward pass
first waits here, for the all-reduces, a loss or the limit of the model, and then leaves the rest to
DDP. A forward pass waits here for the buffers of the first trainer.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from torchweft.arguments import kind_of
from torchweft.embedding.recovery import is_there
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    WeftError,
    WorkerLost,
)
from torchweft.extending import check_types, tell_losses
from torchweft.hybrid.plan import TrainersDiffer
from torchweft.rpc import Future, get_worker_info, rpc_async

# The trainers

T = TypeVar("T")


class Trainers:
    """The trainers, in the order of their ranks.

    Args:
        group: The process group; None for the default group.
        names: Names of the workers.
        rank: Rank of this worker.

    Attributes:
        group: The process group.
        names: Names of all.
        others: Names of those that are not this worker.
        is_first: Whether this worker is the first.
    """

    def __init__(self, group: Any, names: tuple[str, ...], rank: int) -> None:
        self.group = group
        self.names = names
        self.others = names[:rank] + names[rank + 1 :]
        self.is_first = rank == 0

    @classmethod
    def of(cls, group: Any) -> Trainers:
        """Returns the ranks of a process group; this worker alone if there is no group.

        Blocks until all trainers have called it.

        Raises:
            CallTimeout: Another rank has not called it within the limit of the process group.
            NotInitialized: This process is no worker.
            ConfigurationError: This process is not in the group, or a worker is in it twice.
        """
        me = get_worker_info().name
        if group is None and not distributed.is_initialized():
            return cls(None, (me,), 0)
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ConfigurationError(f"worker {me!r} is not in the process group of the trainers")
        names: list[Any] = [None] * distributed.get_world_size(group)
        with _naming(f"the other ranks than {rank} of the process group, which has {len(names)}"):
            distributed.all_gather_object(names, me, group)
        return cls(group, tuple(names), rank)

    @property
    def first(self) -> int:
        """The rank of the first trainer in the default group."""
        return 0 if self.group is None else distributed.get_global_rank(self.group, 0)

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Returns what a function returns at each trainer, in their order. Blocks.

        Raises:
            CallTimeout: Another trainer has not called it within the limit of the process group.
            TrainersDiffer: It has raised an error at another trainer; names it.
            Exception: It has raised this error here.
        """
        if len(self.names) == 1:
            return [make()]
        value: T | None = None
        error: Exception | None = None
        try:
            value = make()
        except Exception as raised:
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        found: list[Any] = [None] * len(self.names)
        with _naming(f"the trainers {', '.join(map(repr, self.others))}"):
            distributed.all_gather_object(found, (value, text), self.group)
        if error is not None:
            raise error
        for name, (_, other) in zip(self.names, found, strict=True):
            if other:
                raise TrainersDiffer(f"trainer {name!r} has failed: {other}", trainer=name)
        return [each for each, _ in found]

    def of_first(self, make: Callable[[], T]) -> T:
        """Returns what a function returns at the first trainer, or raises its error. Blocks.

        Raises:
            CallTimeout: The first trainer has not called it within the limit of the process group.
        """
        if len(self.names) == 1:
            return make()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = make()
            except Exception as error:
                told[1] = error
        with _naming(f"the first trainer, {self.names[0]!r}"):
            distributed.broadcast_object_list(told, self.first, self.group)
        value, raised = told
        if raised is not None:
            raise raised
        found: T = value
        return found


def is_timeout(error: BaseException | None) -> bool:
    """Whether a process group has raised an error as its own time was up."""
    return error is not None and "imed out" in str(error)


@contextmanager
def _naming(whom: str) -> Iterator[None]:
    """Runs a collective of a process group, whose own error names nobody."""
    try:
        yield
    except RuntimeError as error:
        if not is_timeout(error):
            raise
        raise CallTimeout(
            f"a hybrid model waits for {whom}, for longer than the limit of the process group: all "
            "trainers make, restore and save their models together",
            call="HybridModel",
        ) from error


# Collectives of a model

Hook = Callable[[Any, Any], Any]
"""A communication hook of DDP: takes a state and a bucket of gradients, returns a future."""


def check_hook(hook: Hook | None, state: Any, replicas: Sequence[str]) -> None:
    """Checks a user's way to reduce gradients.

    Args:
        hook: The hook; None if there is none.
        state: The first argument of the hook.
        replicas: The modules that are each replicated; none for the whole model.

    Raises:
        ArgumentTypeError: The hook cannot be called.
        ConfigurationError: There is a state without a hook, or one state for several replicas.
    """
    if hook is None:
        if state is not None:
            raise ConfigurationError("comm_state is passed without comm_hook, which would take it")
    elif not callable(hook):
        raise ArgumentTypeError(
            f"comm_hook is {kind_of(hook)}; pass a function of a state and a bucket, as for "
            "register_comm_hook of DistributedDataParallel"
        )
    elif state is not None and len(replicas) > 1:
        raise ConfigurationError(
            f"comm_state is one for the replicas {list(replicas)}, and buckets of each have the "
            "same numbers; pass a comm_hook without a state, or replicate one module"
        )


def name_of(hook: Hook) -> str:
    """Returns the name of a hook, by which trainers compare it."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


_ASK_S = 5.0
"""How long the other trainers have to say how many collectives they have begun."""


class Reductions:
    """The collectives of one model: all-reduces of gradients, and broadcasts of buffers.

    A pass on the CPU raises the loss of a worker, and says which trainer it has waited for.

    Args:
        trainers: The trainers.
        token: Names the model; the same on all trainers, and no other model's.
        name: The model's name.
        servers: Names of the servers, whose loss ends a pass as that of a trainer does.
        limit_s: How long a collective may wait, in seconds; infinity for no limit but that of the
            process group.
        averages: Whether gradients are averaged, rather than summed.
        hook: Reduces the gradients, in place of an all-reduce of them.
        state: The first argument of the hook.

    Attributes:
        begun: How many collectives this trainer has begun.
    """

    def __init__(
        self,
        trainers: Trainers,
        token: str,
        name: str,
        servers: Sequence[str],
        limit_s: float,
        *,
        averages: bool,
        hook: Hook | None = None,
        state: Any = None,
    ) -> None:
        self.begun = 0
        self._trainers = trainers
        self._token = token
        self._name = name
        self._workers = {*trainers.names, *servers}
        self._limit_s = limit_s
        self._factor = 1.0 / len(trainers.names) if averages else None
        self._hook = hook
        self._state = state
        self._failed: Exception | None = None
        """The error of a collective that has failed since the last wait."""
        self._changed = threading.Condition()
        self._open = 0
        self._lost: WorkerLost | None = None
        tell_losses(self, Reductions.worker_lost)
        _models[token] = self

    def close(self) -> None:
        """Notes that this trainer takes part in no further collective."""
        _models.pop(self._token, None)

    def reduce(self, bucket: Any) -> Any:
        """Reduces the gradients of a bucket; the future has them. A hook of DDP."""
        self._raise_loss()
        is_on_cpu = bucket.buffer().device.type == "cpu"
        # The first one of a pass: an error elsewhere in the former pass makes no difference.
        is_first = bucket.index() == 0
        began_s = self._begin() if is_first else 0.0
        future = self._all_reduced(bucket) if self._hook is None else self._hooked(bucket)
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
        began_s = self._begin()
        group, source = self._trainers.group, self._trainers.first
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for each in buffers.values():
            by_type.setdefault(each.dtype, []).append(each)
        for tensors in by_type.values():
            joined = torch.cat([each.reshape(-1) for each in tensors])
            work = distributed.broadcast(joined, source, group=group, async_op=True)
            self._complete(work, "the broadcast of buffers in a forward pass", began_s)
            if not self._trainers.is_first:
                parts = torch.split(joined, [each.numel() for each in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def join_maximum(self, tensor: Tensor) -> None:
        """Replaces a tensor by the maximum of all trainers, element by element. Blocks.

        Raises:
            CallTimeout: Another trainer does not take part; names it.
            WorkerLost: A worker of the model was lost.
        """
        self._raise_loss()
        began_s = self._begin()
        largest, group = distributed.ReduceOp.MAX, self._trainers.group
        work = distributed.all_reduce(tensor, largest, group, async_op=True)
        if tensor.device.type == "cpu":
            self._complete(work, "the join of used rows in a step", began_s)
        else:
            work.wait()  # On a GPU only the stream waits.

    def _begin(self) -> float:
        """Counts one more collective; returns when it began, by ``time.monotonic``."""
        self.begun += 1
        return time.monotonic()

    def _complete(self, work: Any, what: str, began_s: float) -> None:
        """Waits for a collective on the CPU."""
        future = work.get_future()
        self._note(future)
        self._wait(what, began_s)
        future.wait()

    def _all_reduced(self, bucket: Any) -> Any:
        gradients = bucket.buffer()
        if self._factor is not None:
            gradients.mul_(self._factor)  # As DDP itself does it, to the same bits.
        work = distributed.all_reduce(gradients, group=self._trainers.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _hooked(self, bucket: Any) -> Any:
        assert self._hook is not None
        future = self._hook(self._state, bucket)
        # The base of torch.futures.Future: process groups return it as it is.
        if not isinstance(future, torch._C.Future):
            raise ArgumentTypeError(
                f"comm_hook {name_of(self._hook)} returned {kind_of(future)}; return a "
                "torch.futures.Future with the reduced gradients of the bucket"
            )
        return future

    # Waits

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
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: not self._open or self._lost is not None,
                None if math.isinf(self._limit_s) else self._limit_s,
            )
            failed, self._failed = self._failed, None
        self._raise_loss()
        if not is_over or is_timeout(failed):
            raise self._late(what, time.monotonic() - began_s) from failed

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

    def _late(self, what: str, elapsed_s: float) -> CallTimeout:
        """Returns the error of a collective that has waited too long. Blocks for some seconds."""
        states = self._ask()
        behind = {name: state for name, state in states.items() if state}
        told = ", and ".join(f"{name!r}, which {state}" for name, state in behind.items())
        if not behind:
            told = ", ".join(map(repr, states)) + ", all of which take part in it as well"
        return CallTimeout(
            f"{what} of hybrid model {self._name!r} has waited {elapsed_s:.0f} s for the trainers "
            f"{told}: all trainers make the same number of steps, so give each as many batches, or "
            "pass a larger HybridModel(timeout=) if one is only slow",
            worker=next(iter(behind or states), ""),
            call=what,
            elapsed_s=elapsed_s,
        )

    def _ask(self) -> dict[str, str]:
        """Returns why each other trainer is missing, by name; empty text if it is not."""
        calls: dict[str, Future[int | None]] = {}
        states: dict[str, str] = {}
        for name in self._trainers.others:
            try:
                calls[name] = rpc_async(name, begun_for, args=(self._token,), timeout=_ASK_S)
            except WeftError as error:
                states[name] = f"cannot be asked ({error})"
        for name, call in calls.items():
            try:
                begun = call.wait()
                states[name] = "has closed the model"
                if begun is not None:
                    states[name] = f"is {self.begun - begun} behind" if begun < self.begun else ""
            except WeftError as error:
                states[name] = f"does not answer ({error})"
        return states


_models: weakref.WeakValueDictionary[str, Reductions] = weakref.WeakValueDictionary()
"""The models that are open on this trainer, by token."""


def begun_for(token: str) -> int | None:
    """Returns how many collectives this trainer has begun for a model; None if it is closed."""
    check_types(token=(token, str))
    found = _models.get(token)
    return None if found is None else found.begun
