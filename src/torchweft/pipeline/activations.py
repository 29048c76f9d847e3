"""The frozen front of a model, whose results are computed once for each sample and kept.

A frozen layer returns the same for a sample in each epoch. So the worker that runs the front for a
sample keeps the result. In a later epoch another worker may get the sample, or more layers may be
frozen: then that worker asks for the result, and runs only the layers that it does not have.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.extending import this_worker
from torchweft.pipeline.wiring import describe
from torchweft.rpc import RRef, on

NOT_A_SAMPLE = -1
NOWHERE = -1


class Kept(NamedTuple):
    """The results of some samples after the same number of layers.

    Attributes:
        depth: The number of layers.
        samples: The numbers of the samples.
        structure: The result with the places of its tensors in their stead.
        leaves: The tensors of the result, with a row for each sample.
    """

    depth: int
    samples: list[int]
    structure: Any
    leaves: list[Tensor]

    @property
    def value(self) -> Any:
        """The result, as the next layer takes it."""
        return _pytree.tree_map(self.leaves.__getitem__, self.structure)


def _kept(depth: int, samples: list[int], n_rows: int, value: Any) -> Kept:
    """Returns a result as it is kept.

    Args:
        depth: The number of layers.
        samples: The samples.
        n_rows: How many rows its tensors must have.
        value: The result.

    Raises:
        ConfigurationError: It is not made of tensors with a row for each sample.
    """
    leaves, spec = _pytree.tree_flatten(value)
    if not all(isinstance(each, Tensor) and each.shape[:1] == (n_rows,) for each in leaves):
        raise ConfigurationError(
            f"the first {depth} layers return {describe(value)} for {n_rows} samples, which cannot "
            "be kept by sample; it takes tensors with the samples along dimension 0. Freeze other "
            "layers, or call step without samples"
        )
    return Kept(depth, samples, _pytree.tree_unflatten(range(len(leaves)), spec), leaves)


class ActivationStore:
    """Keeps results of the frozen front on one worker. Thread-safe.

    Args:
        max_bytes: How much to keep; a result that has no room is not kept, since all samples
            come equally often. None for no limit.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rows: dict[int, tuple[int, list[Tensor]]] = {}
        self._structures: dict[int, Any] = {}
        self.n_bytes = 0
        self.n_layers_run = 0

    def put(self, kept: Kept) -> None:
        """Keeps results, in place of those of the same samples."""
        with self._lock:
            self._structures[kept.depth] = kept.structure
            for place, sample in enumerate(kept.samples):
                self._drop(sample)
                row = [leaf[place].clone() for leaf in kept.leaves]
                size = _size_of(row)
                if self._max_bytes is None or self.n_bytes + size <= self._max_bytes:
                    self._rows[sample] = kept.depth, row
                    self.n_bytes += size

    def get(self, samples: Iterable[int], depth: int) -> list[Kept]:
        """Returns the results of those of these samples that it has.

        Args:
            samples: Their numbers.
            depth: How many layers are frozen; results after fewer are given away, since the worker
                that asks will keep those after more.
        """
        with self._lock:
            found: dict[int, tuple[list[int], list[list[Tensor]]]] = {}
            for sample in samples:
                if sample in self._rows:
                    at, row = self._rows[sample]
                    numbers, rows = found.setdefault(at, ([], []))
                    numbers.append(sample)
                    rows.append(row)
                    if at < depth:
                        self._drop(sample)
            return [
                Kept(
                    at, numbers, self._structures[at], [*map(torch.stack, zip(*rows, strict=True))]
                )
                for at, (numbers, rows) in found.items()
            ]

    def usage(self) -> tuple[int, int]:
        """Returns the bytes that it keeps, and how often a layer was run here for a sample."""
        return self.n_bytes, self.n_layers_run

    def _drop(self, sample: int) -> None:
        _, row = self._rows.pop(sample, (0, []))
        self.n_bytes -= _size_of(row)


def _size_of(row: Sequence[Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in row)


@dataclass(frozen=True)
class FrontMaker:
    """Makes a ``FrozenFront`` on its worker, so that the driver's layers are not changed.

    Attributes:
        layers: The layers of the first stage, by name.
        n_frozen: How many of them are frozen, from the first on.
        training: Whether the others are in training mode.
        stores: The stores that keep results, by the id of the worker.
        limit_s: How long to wait for results of another worker.
    """

    layers: OrderedDict[str, nn.Module]
    n_frozen: int
    training: bool
    stores: dict[int, RRef[ActivationStore]]
    limit_s: float

    def __call__(self) -> FrozenFront:
        """Returns the stage."""
        return FrozenFront(self)


class FrozenFront(nn.Sequential):
    """The first stage of a pipeline, whose first layers are frozen.

    Frozen layers are in evaluation mode, and run without gradients.

    Args:
        maker: Its layers.
    """

    def __init__(self, maker: FrontMaker) -> None:
        super().__init__(maker.layers)
        self._n_frozen, self._limit_s = maker.n_frozen, maker.limit_s
        self._stores = maker.stores
        for layer in self._frozen():
            layer.requires_grad_(False)
            layer.eval()
        self.training = maker.training

    def train(self, mode: bool = True) -> FrozenFront:
        """Sets the mode of the layers that are not frozen."""
        super().train(mode)
        for layer in self._frozen():
            layer.eval()
        return self

    def _frozen(self, first: int = 0) -> list[nn.Module]:
        return list(self)[first : self._n_frozen]

    def forward(self, inputs: Any, samples: Tensor, homes: Tensor) -> Any:  # type: ignore[override]
        """Runs all layers; of the frozen ones, those whose results are not kept anywhere.

        Args:
            inputs: The inputs of the model, with a row for each sample.
            samples: The numbers of the samples, or ``NOT_A_SAMPLE`` to keep nothing; shape
                ``(rows,)``.
            homes: The ids of the workers that may have results, or ``NOWHERE``; shape ``(rows,)``.
        """
        with torch.no_grad():
            value = self._front(inputs, samples.tolist(), homes.tolist())
        for layer in list(self)[self._n_frozen :]:
            value = layer(value)
        return value

    def _front(self, inputs: Any, samples: list[int], homes: list[int]) -> Any:
        if NOT_A_SAMPLE in samples:
            return self._run(inputs, 0)
        store = self._own_store()
        found = [*self._found(store, samples, homes)]
        known = {sample for kept in found for sample in kept.samples}
        places = {sample: place for place, sample in enumerate(samples) if sample not in known}
        if places:
            rows = torch.tensor(list(places.values()), device="cpu")
            whole = _kept(0, list(places), len(samples), inputs)
            found.append(whole._replace(leaves=[leaf[rows] for leaf in whole.leaves]))
        return _joined([self._deepened(store, kept) for kept in found], samples)

    def _own_store(self) -> ActivationStore:
        return self._stores[this_worker().id].local_value()

    def _run(self, value: Any, depth: int) -> Any:
        for layer in self._frozen(depth):
            value = layer(value)
        return value

    def _found(
        self, store: ActivationStore, samples: list[int], homes: list[int]
    ) -> Iterator[Kept]:
        """Yields the results that this worker or others have."""
        yield from store.get(samples, 0)
        me = this_worker().id
        asked: dict[int, list[int]] = {}
        for sample, home in zip(samples, homes, strict=True):
            if home not in (me, NOWHERE):
                asked.setdefault(home, []).append(sample)
        futures = []
        lost = contextlib.suppress(WorkerLost, CallTimeout)  # Results are then computed again.
        for home, its in asked.items():
            with lost:
                host = on(self._stores[home], self._limit_s)
                futures.append(host.rpc_async(ActivationStore.get, its, self._n_frozen))
        for future in futures:
            with lost:
                yield from future.wait()

    def _deepened(self, store: ActivationStore, kept: Kept) -> Kept:
        """Runs those of the frozen layers that a result lacks, and keeps the new result."""
        n_missing, count = self._n_frozen - kept.depth, len(kept.samples)
        if not n_missing:
            return kept
        value = self._run(kept.value, kept.depth)
        kept = _kept(self._n_frozen, kept.samples, count, value)
        store.n_layers_run += n_missing * count
        store.put(kept)
        return kept


def _joined(parts: Sequence[Kept], samples: Sequence[int]) -> Any:
    """Returns results of the same layers as one, in the order of the samples."""
    order = {sample: row for row, sample in enumerate(s for part in parts for s in part.samples)}
    rows = torch.tensor([order[sample] for sample in samples], device="cpu")
    columns = zip(*(part.leaves for part in parts), strict=True)
    leaves = [torch.cat(column)[rows] for column in columns]
    return _pytree.tree_map(leaves.__getitem__, parts[0].structure)
