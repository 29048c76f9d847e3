"""The trainers of a model: ranks of a process group, and their names as workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor, distributed

from torchweft.errors import CallTimeout, ConfigurationError
from torchweft.hybrid.errors import TrainersDiffer
from torchweft.hybrid.missing import Turns, is_timeout
from torchweft.rpc import get_worker_info

T = TypeVar("T")


@dataclass
class Told:
    """What the first trainer tells the others.

    Attributes:
        is_first: Whether this is the first trainer, who sets the value.
        value: The value; on all trainers at the end of the block.
    """

    is_first: bool
    value: Any = None


class Trainers:
    """The trainers, in the order of their ranks.

    Args:
        group: The process group; None for the default group.
        names: Names of the workers.
        rank: Rank of this worker.
    """

    def __init__(self, group: Any, names: tuple[str, ...], rank: int) -> None:
        self._group = group
        self.names = names
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
        with _naming(self._others()):
            distributed.all_gather_object(found, (value, text), self._group)
        if error is not None:
            raise error
        for name, (_, other) in zip(self.names, found, strict=True):
            if other:
                raise TrainersDiffer(f"trainer {name!r} has failed: {other}", trainer=name)
        return [each for each, _ in found]

    def _others(self) -> str:
        me = get_worker_info().name
        return f"the trainers {', '.join(repr(each) for each in self.names if each != me)}"

    def join_maximum(self, tensor: Tensor, turns: Turns) -> None:
        """Replaces a tensor by the maximum of all trainers, element by element. Blocks.

        Raises:
            CallTimeout: Another trainer does not take part; names it.
        """
        began_s = turns.begin()
        work = distributed.all_reduce(tensor, distributed.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        if tensor.device.type != "cpu" or math.isinf(turns.limit_s):
            work.wait()  # On a GPU only the stream waits.
            return
        try:
            work.wait(timedelta(seconds=turns.limit_s))
        except RuntimeError as error:
            if is_timeout(error):
                raise turns.missing("the join of used rows in a step", began_s) from error
            raise

    @contextmanager
    def first_tells(self) -> Iterator[Told]:
        """Runs a block in which the first trainer sets a value, or raises for all. Blocks."""
        told, error = Told(self.is_first), None
        try:
            yield told
        except Exception as raised:
            if len(self.names) == 1:
                raise
            error = raised
        if len(self.names) == 1:
            return
        first: list[Any] = [(told.value, error)]
        source = 0 if self._group is None else distributed.get_global_rank(self._group, 0)
        with _naming(f"the first trainer, {self.names[0]!r}"):
            distributed.broadcast_object_list(first, source, self._group)
        told.value, first_error = first[0]
        if error is not None or first_error is not None:
            raise error or first_error

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Runs a block of which the first trainer does the work, and all see its end. Blocks."""
        with self.first_tells() as told:
            yield told.is_first


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
