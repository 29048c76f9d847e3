"""Partitioners decide which worker gets which part of the arguments of a map.

``TensorDimensionPartitioner`` cuts the tensors in the arguments along a dimension. Any function of
these arguments can be a partitioner, too. ``cut`` takes the program's ``partitioner``, and checks
its result: a mistake of a partitioner would otherwise show on another worker, as an error of a
correct function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchweft import extending
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce import trees
from torchweft.mapreduce.world import get_world_rank, get_world_size
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
    if not extending.is_worker() and not isinstance(worker, str):
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
    if extending.is_worker():
        return tuple(info.id for info in get_worker_infos())
    return tuple(range(get_world_size()))


def without_lost(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks of workers that are not lost; all ranks if every worker is lost."""
    if not extending.is_worker():
        return ranks
    left = {peer.info.id for peer in extending.present_workers() if peer.lost is None}
    return tuple(rank for rank in ranks if rank in left) or ranks


# The partitioner that cuts tensors along a dimension

_BROADCAST = "pass torchweft.mapreduce.broadcast(...) for a tensor that every part is to get whole"
_is_whole = trees.whole_unless(Tensor, Broadcast)


@dataclass(frozen=True)
class TensorDimensionPartitioner:
    """Cuts every tensor in the arguments along one dimension, for several workers.

    The arguments may be trees: tuples, lists, dicts and other types that ``torch.utils._pytree``
    knows. Non-tensors and values marked by ``broadcast`` go to every part as they are. The parts
    stay in the autograd graph. Two partitioners with the same options are equal. Partitioners can
    be pickled.

    Args:
        dim: The dimension; a negative number counts from the last.
        exclusive: Whether each index is a part of its own; these parts go to the workers in turn.
            Otherwise there is one part for each worker, or for each index if there are fewer
            indices. All parts have the same length except the last part, which also has the rest.
        keepdim: Whether parts keep the dimension. Without it they must be ``exclusive``.
        workers: Names or ranks of the workers, which take turns in this order. A worker that is
            listed twice gets twice as much. None for all of the group, by rank. Lost workers
            get nothing.

    Raises:
        ArgumentTypeError: ``dim`` is not an integer, or ``workers`` not a collection of workers.
        ConfigurationError: ``keepdim=False`` without ``exclusive=True``; ``workers`` is empty.
    """

    dim: int
    _: KW_ONLY
    exclusive: bool = False
    keepdim: bool = False
    workers: Sequence[Worker] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ArgumentTypeError(
                f"dim is {kind_of(self.dim)}; pass the number of a dimension, such as 0"
            )
        if not self.keepdim and not self.exclusive:
            raise ConfigurationError(
                "keepdim=False needs exclusive=True: a part without the dimension holds one index; "
                "pass keepdim=True for parts of several"
            )
        if self.workers is not None:
            object.__setattr__(self, "workers", checked_workers(self.workers, "workers"))

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[Part]:
        """Returns the parts of the arguments.

        Arguments without a tensor make one part, for this worker. Tensors of length 0 make no
        parts.

        Raises:
            ConfigurationError: A tensor does not have the dimension; two tensors differ in length
                along it; a worker does not exist.
        """
        flat, spec = trees.flatten((args, kwargs), _is_whole)
        length = self._length(flat, args, kwargs)
        if length is None:
            return [Part(get_world_rank(), *bare((args, kwargs)))]
        ranks = self.ranks()
        sizes = self._sizes(length, len(ranks))
        columns = [self._pieces(leaf, sizes) for leaf in flat]
        parts = []
        for index, (size, *leaves) in enumerate(zip(sizes, *columns, strict=True)):
            part_args, part_kwargs = trees.unflatten(leaves, spec)
            worker = ranks[index % len(ranks)]
            parts.append(Part(worker, part_args, part_kwargs, weight=float(size)))
        return parts

    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the workers that may get parts: all that are not lost.

        Raises:
            ConfigurationError: A worker does not exist.
        """
        if self.workers is None:
            return without_lost(all_ranks())
        return without_lost(ranks_of(tuple(self.workers), "workers"))

    def _length(self, flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Returns the length of all tensors along the dimension; None if there are no tensors."""
        tensors = [(index, leaf) for index, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        lengths: dict[int, tuple[int, Tensor]] = {}
        for index, tensor in tensors:
            if not -tensor.dim() <= self.dim < tensor.dim():
                path = _paths(args, kwargs)[index]
                raise ConfigurationError(
                    f"{path}, {kind_of(tensor)}, has no dimension {self.dim} to be cut along; "
                    f"{_BROADCAST}"
                )
            lengths.setdefault(tensor.size(self.dim), (index, tensor))
        if len(lengths) > 1:
            paths = _paths(args, kwargs)
            first, second = (
                f"{paths[index]}, {kind_of(tensor)}," for index, tensor in [*lengths.values()][:2]
            )
            raise ConfigurationError(
                f"{first} and {second} differ in length along dimension {self.dim}, along which "
                f"they are to be cut; {_BROADCAST}"
            )
        return next(iter(lengths), None)

    def _sizes(self, length: int, worker_count: int) -> list[int]:
        if self.exclusive or not length:
            return [1] * length
        count = min(length, worker_count)
        size = length // count
        return [size] * (count - 1) + [length - size * (count - 1)]

    def _pieces(self, leaf: Any, sizes: list[int]) -> Sequence[Any]:
        """Returns the piece of one leaf for each part."""
        if isinstance(leaf, Broadcast):
            return [leaf.value] * len(sizes)
        if not isinstance(leaf, Tensor):
            return [leaf] * len(sizes)
        # One graph node for all pieces: with one view for each piece, each node would allocate a
        # gradient of the whole length, filled with zeros.
        try:
            return torch.split(leaf, sizes, self.dim) if self.keepdim else leaf.unbind(self.dim)
        except RuntimeError as error:  # for instance, the tensor is sparse
            raise ConfigurationError(
                f"{kind_of(leaf)} with layout {leaf.layout} cannot be cut along dimension "
                f"{self.dim}; pass a dense one, or mark it by torchweft.mapreduce.broadcast(...)"
            ) from error


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the path of each leaf in the arguments."""
    named = {"args": args, "kwargs": kwargs}
    return [name + path for name, tree in named.items() for path in trees.paths(tree, _is_whole)]


def dim_partitioner(
    dim: int = 0,
    *,
    exclusive: bool = False,
    keepdim: bool = True,
    workers: Sequence[Worker] | None = None,
) -> TensorDimensionPartitioner:
    """Returns a partitioner that cuts every tensor in the arguments along a dimension.

    Args:
        dim: The dimension; a negative number counts from the last.
        exclusive: Whether each index is a part of its own; these parts go to the workers in turn.
            Otherwise there is one part for each worker, or for each index if there are fewer
            indices.
        keepdim: Whether parts keep the dimension. Without it they must be ``exclusive``.
        workers: Names or ranks of the workers, which take turns in this order. A worker that is
            listed twice gets twice as much. None for all of the group, by rank.

    Raises:
        ArgumentTypeError: ``dim`` is not an integer, or ``workers`` not a collection of workers.
        ConfigurationError: ``keepdim=False`` without ``exclusive=True``; ``workers`` is empty.
    """
    return TensorDimensionPartitioner(dim, exclusive=exclusive, keepdim=keepdim, workers=workers)


batch_partitioner = dim_partitioner(0)
"""Cuts tensors along their first dimension, into one part for each worker."""

exclusive_batch_partitioner = dim_partitioner(0, exclusive=True)
"""Cuts tensors along their first dimension, into parts of length 1."""


# Any partitioner

Triple: TypeAlias = "Part | tuple[Worker, tuple[Any, ...], dict[str, Any] | None]"
Partitioner: TypeAlias = "Callable[..., Iterable[Triple]] | Worker"

_TRIPLES = "return a list of triples (worker, args, kwargs), one for each call"


def cut(
    partitioner: Partitioner | None,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Cut:
    """Returns the parts of a map, and the workers that may run them.

    Arguments whose tensors have length 0 make no parts: the map is complete at once, and its list
    of results is empty; a reducer gets this list.

    Args:
        partitioner: A function; or a worker, which gets all of the arguments as one part; or None
            for ``batch_partitioner``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ArgumentTypeError: The partitioner is neither a function nor a worker, or the arguments are
            not a tuple and a dict.
        ConfigurationError: The partitioner returned something other than triples of a worker, args
            and kwargs; no triple for arguments that are not empty; or an unknown worker. Or the
            tensors cannot be cut.
        Exception: A function of the user raised it; a note names the partitioner.
    """
    own_args, own_kwargs = _arguments(args, kwargs, "")
    if partitioner is None:
        partitioner = batch_partitioner
    if callable(partitioner):
        return _cut_by(partitioner, own_args, own_kwargs)
    if not is_worker(partitioner):
        raise ArgumentTypeError(
            f"partitioner is {kind_of(partitioner)}; pass a function that returns triples (worker, "
            "args, kwargs), the rank or name of a worker, or None for batch_partitioner"
        )
    rank = rank_of(partitioner, "partitioner")
    return Cut([Part(rank, *bare((own_args, own_kwargs)))], (rank,), is_any=False)


def _cut_by(
    partitioner: Callable[..., Iterable[Triple]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Cut:
    triples = _called(partitioner, args, kwargs)
    if isinstance(partitioner, TensorDimensionPartitioner):
        workers = dict.fromkeys([*partitioner.ranks(), *(part[0] for part in triples)])
        return Cut(triples, tuple(workers), is_any=True)
    parts = _checked(triples, partitioner)
    if not parts and not any(_is_empty(value) for value in (*args, *kwargs.values())):
        raise ConfigurationError(
            f"partitioner {_name(partitioner)} returned no triples, and the arguments are not "
            f"empty; {_TRIPLES}"
        )
    return Cut(parts, tuple(dict.fromkeys(part[0] for part in parts)), is_any=False)


def _called(
    partitioner: Callable[..., Iterable[Triple]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of a partitioner, as a list if it is a collection of triples."""
    try:
        triples = partitioner(*args, **kwargs)
        is_many = isinstance(triples, Iterable) and not isinstance(triples, (Mapping, str, Tensor))
        return list(triples) if is_many else triples
    except Exception as error:
        with_note(error, f"raised by partitioner {_name(partitioner)}")
        raise


def _checked(triples: Any, partitioner: object) -> list[Part]:
    """Returns the parts for the triples of a partitioner; raises if a triple is invalid."""
    name = f"partitioner {_name(partitioner)}"
    if not isinstance(triples, list):
        raise ConfigurationError(f"{name} returned {kind_of(triples)}; {_TRIPLES}")
    return [_part(triple, f"triple {at} of {name}") for at, triple in enumerate(triples)]


def _part(triple: Any, where: str) -> Part:
    if not isinstance(triple, (list, tuple)) or len(triple) != 3:
        raise ConfigurationError(f"{where} is {kind_of(triple)}; {_TRIPLES}")
    worker, args, kwargs = triple
    rank = rank_of(worker, f"the worker in {where}")
    own_args, own_kwargs = _arguments(args, kwargs, f" in {where}")
    weight = triple.weight if isinstance(triple, Part) else 1.0
    part_args, part_kwargs = bare((own_args, own_kwargs))
    return Part(rank, part_args, part_kwargs, weight)


def _arguments(args: Any, kwargs: Any, where: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs of a call; None stands for empty."""
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(args, (list, tuple)):
        raise ArgumentTypeError(
            f"args{where} is {kind_of(args)}; pass a tuple such as (x, y) or (x,)"
        )
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ArgumentTypeError(
            f"kwargs{where} is {kind_of(kwargs)}; pass a dict whose keys are strings"
        )
    return tuple(args), kwargs


def _is_empty(argument: Any) -> bool:
    """Whether an argument contains an empty collection, such as a batch or a list of tasks."""
    flat, _ = trees.flatten(argument, trees.is_leafless)
    return any(trees.is_leafless(leaf) or _has_nothing(leaf) for leaf in flat)


def _has_nothing(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.numel()
    try:
        return not len(leaf)
    except TypeError:  # it has no length
        return False


def _name(partitioner: object) -> str:
    is_own = isinstance(partitioner, TensorDimensionPartitioner)
    return repr(partitioner) if is_own else extending.function_name(partitioner)
