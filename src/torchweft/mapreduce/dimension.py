"""The partitioner that cuts the tensors in the arguments of a map along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce import trees
from torchweft.mapreduce.parts import Broadcast, Part, kind_of, unwrap
from torchweft.mapreduce.workers import (
    Worker,
    all_ranks,
    checked_workers,
    own_rank,
    ranks_of,
    without_lost,
)

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
            return [Part(own_rank(), *unwrap(args, kwargs))]
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
