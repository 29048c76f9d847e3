"""The trainers of a model: ranks of a process group, and their names as workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, distributed

from torchweft.errors import ConfigurationError
from torchweft.hybrid.errors import TrainersDiffer
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
        distributed.all_gather_object(names, me, group)
        return cls(group, tuple(names), rank)

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Returns what a function returns at each trainer, in their order. Blocks.

        Raises:
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
        distributed.all_gather_object(found, (value, text), self._group)
        if error is not None:
            raise error
        for name, (_, other) in zip(self.names, found, strict=True):
            if other:
                raise TrainersDiffer(f"trainer {name!r} has failed: {other}", trainer=name)
        return [each for each, _ in found]

    def join_maximum(self, tensor: Tensor) -> None:
        """Replaces a tensor by the maximum of all trainers, element by element. Blocks."""
        if len(self.names) > 1:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX, self._group)

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
        distributed.broadcast_object_list(first, source, self._group)
        told.value, first_error = first[0]
        if error is not None or first_error is not None:
            raise error or first_error

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Runs a block of which the first trainer does the work, and all see its end. Blocks."""
        with self.first_tells() as told:
            yield told.is_first
