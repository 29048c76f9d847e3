"""Partitioners decide which worker gets which part of the arguments of a map.

Any function of these arguments can be a partitioner. ``cut`` takes the program's ``partitioner``,
and checks its result: a mistake of a partitioner would otherwise show on another worker, as an
error of a correct function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce import trees
from torchweft.mapreduce.dimension import (
    TensorDimensionPartitioner,
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from torchweft.mapreduce.notes import with_note
from torchweft.mapreduce.parts import Cut, Part, broadcast, kind_of, unwrap
from torchweft.mapreduce.workers import Worker, is_worker, rank_of
from torchweft.serialize.functions import describe

__all__ = [
    "Cut",
    "Part",
    "Partitioner",
    "TensorDimensionPartitioner",
    "batch_partitioner",
    "broadcast",
    "cut",
    "dim_partitioner",
    "exclusive_batch_partitioner",
    "unwrap",
]

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
    return Cut([Part(rank, *unwrap(own_args, own_kwargs))], (rank,), is_any=False)


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
    return Part(rank, *unwrap(own_args, own_kwargs), weight=weight)


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
    return repr(partitioner) if is_own else describe(partitioner)
