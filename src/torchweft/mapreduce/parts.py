"""The data of a map: its parts, the values that all parts get, and the workers that it names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from torchweft.engine.worker.current import current, is_set
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce import trees
from torchweft.mapreduce.world import get_world_size
from torchweft.rpc import get_worker_info, get_worker_infos


class Part(tuple[int, tuple[Any, ...], dict[str, Any]]):
    """One call of a map: the triple of a worker, and args and kwargs for it.

    Args:
        worker: Rank of the worker; a partitioner of the user may also give its name.
        args: Positional arguments.
        kwargs: Keyword arguments.
        weight: The weight of the result in a mean: how many indices the part holds along the
            dimension that was cut.
    """

    weight: float

    def __new__(
        cls, worker: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float = 1.0
    ) -> Part:
        """Makes the triple."""
        part = super().__new__(cls, (worker, args, kwargs))  # type: ignore[arg-type]
        part.weight = weight
        return part

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.weight)


class Cut(NamedTuple):
    """The result of a partitioner for the arguments of a map.

    Attributes:
        parts: The calls, in order; empty if the arguments are.
        workers: Ranks of the workers to choose from, including the workers of the parts.
        is_any: Whether any of these workers may run any of the parts.
    """

    parts: list[Part]
    workers: tuple[int, ...]
    is_any: bool


class Broadcast:
    """The mark that ``broadcast`` puts on a value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"broadcast({type(self.value).__name__})"


def broadcast(value: Any) -> Any:
    """Marks an argument of a map that every part gets whole.

    ``batch_partitioner`` and its variants cut all other tensors in the arguments. Modules, numbers
    and other non-tensors go to every part as they are, and need no mark. A marked value travels
    once to each worker, not once for each part.

    Args:
        value: A tensor, or a tree of tensors such as a state dict; an argument or a value in one.

    Returns:
        The mark, to be passed in place of ``value``. The mapped function sees ``value``. A
        function used as partitioner sees the mark, and may return triples that contain it.
    """
    return Broadcast(bare(value))


def bare(tree: Any) -> Any:
    """Returns a tree without the marks of ``broadcast``; branches without marks are not copied."""
    flat, spec = trees.flatten(tree, trees.whole_unless(Broadcast))
    return trees.unflatten(
        [leaf.value if isinstance(leaf, Broadcast) else leaf for leaf in flat], spec
    )


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a function without the marks of ``broadcast``."""
    return bare(args), bare(kwargs)


def kind_of(value: object) -> str:
    """Describes a value, for error messages."""
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, Tensor):
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{kind} of {len(value)}"
    return "None" if value is None else kind


# Notes: where in a map an error of a program was raised

Error = TypeVar("Error", bound=BaseException)


def with_note(error: Error, text: str) -> Error:
    """Returns an error with a note, as ``add_note`` of Python 3.11 makes it."""
    # Some errors take no attributes: frozen dataclasses, for instance.
    with contextlib.suppress(Exception):
        error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]
    return error


# Workers. Before this process joins a group, a rank is taken as it is, and a name cannot be
# resolved.

Worker: TypeAlias = "int | str | WorkerInfo"


def is_worker(value: object) -> bool:
    """Whether a value can identify a worker: a rank, a name or a ``WorkerInfo``."""
    return isinstance(value, (int, str, WorkerInfo)) and not isinstance(value, bool)


def rank_of(worker: Any, where: str) -> int:
    """Returns the rank of a worker; ``where`` names the argument in error messages."""
    if not is_worker(worker):
        raise ArgumentTypeError(
            f"{where} is {kind_of(worker)}; pass the rank or the name of a worker"
        )
    if not is_set() and not isinstance(worker, str):
        return worker.id if isinstance(worker, WorkerInfo) else int(worker)
    try:
        return get_worker_info(worker).id
    except UnknownWorker as error:
        raise ConfigurationError(f"{where}: {error}") from error


def checked_workers(workers: Iterable[Worker], where: str) -> tuple[Worker, ...]:
    """Returns several workers; raises if there is none, or if an item is not a worker."""
    if isinstance(workers, (str, WorkerInfo)) or not isinstance(workers, Iterable):
        raise ArgumentTypeError(
            f"{where} is {kind_of(workers)}; pass a list, such as {where}=['worker0', 1]"
        )
    listed = tuple(workers)
    for position, worker in enumerate(listed):
        if not is_worker(worker):
            raise ArgumentTypeError(
                f"{where}[{position}] is {kind_of(worker)}; pass the ranks or names of workers"
            )
    if not listed:
        raise ConfigurationError(f"{where} is empty; name one at least, or pass None for all")
    return listed


def ranks_of(workers: tuple[Worker, ...], where: str) -> tuple[int, ...]:
    """Returns the ranks of several workers."""
    return tuple(rank_of(worker, f"{where}[{at}]") for at, worker in enumerate(workers))


def all_ranks() -> tuple[int, ...]:
    """Returns the ranks of all workers of the group."""
    if is_set():
        return tuple(info.id for info in get_worker_infos())
    return tuple(range(get_world_size()))


def without_lost(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks of workers that are not lost; all ranks if every worker is lost."""
    if not is_set():
        return ranks
    left = {peer.info.id for peer in current().members.present() if peer.lost is None}
    return tuple(rank for rank in ranks if rank in left) or ranks
