"""A pipeline that becomes shorter: when layers freeze, and when workers are lost.

After He et al. 2021, "PipeTransformer: Automated Elastic Pipelining for Distributed Training of
Transformers": the first layers of a network converge first. The rules that freeze layers, and the
order of the samples, change from epoch to epoch.
"""

from __future__ import annotations

import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchweft.arguments import checked_int, limit_of, wrong_type
from torchweft.checkpoint import Snapshot
from torchweft.checkpoint import restore as restore_part
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError
from torchweft.pipeline.activations import (
    NOT_A_SAMPLE,
    NOWHERE,
    ActivationStore,
    FrontMaker,
)
from torchweft.pipeline.cutting import Stages, find_ties
from torchweft.pipeline.deployment import Schedules
from torchweft.pipeline.optimizer import PipeOptimizer
from torchweft.pipeline.partition import Profile, balance
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.schedules import Table
from torchweft.pipeline.wiring import BATCH, Take, Wiring
from torchweft.rpc import (
    UNSET_RPC_TIMEOUT,
    WorkerState,
    get_worker_info,
    health,
    on,
    remote,
)

__all__ = [
    "ElasticPipe",
    "FreezeAt",
    "FreezeByNorm",
    "FreezeFraction",
    "Freezing",
    "Samples",
    "Shape",
    "Usage",
]


class Shape(NamedTuple):
    """The form of an elastic pipeline at a time.

    Attributes:
        n_frozen: How many layers are frozen, from the first on.
        cuts: The first layer of each stage except the first.
        replicas: The number of workers of each stage.
    """

    n_frozen: int
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]


class Usage(NamedTuple):
    """What has become of the results of frozen layers.

    Attributes:
        n_bytes: By worker, the size of the results that it keeps.
        n_layers_run: By worker, how often it has run a frozen layer for a sample.
    """

    n_bytes: dict[str, int]
    n_layers_run: dict[str, int]


@dataclass
class _SavedShape:
    """That part of a snapshot which says how the layers are to be cut.

    Attributes:
        n_frozen: How many layers are frozen.
        epoch: How many epochs have been done.
    """

    n_frozen: int
    epoch: int

    def state_dict(self) -> dict[str, int]:
        return {"n_frozen": self.n_frozen, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.n_frozen, self.epoch = state["n_frozen"], state["epoch"]


class ElasticPipe(Closing):
    """A pipeline that becomes shorter, with more replicas, as its first layers freeze.

    All workers take part at any time. At first each has a stage. When layers freeze, those that
    still train are cut again: into the fewest stages that are no larger than at the beginning, each
    with the same number of replicas. Frozen layers stay in the first stage, in evaluation mode;
    their results are kept by sample on the workers, so they run once for each. Weights and the
    optimizer's state go from worker to worker. After a loss, it goes on from a snapshot on the
    workers that are left. After He et al. 2021, "PipeTransformer". Not thread-safe.

    Args:
        model: The model; each child is a layer, and freezes as a whole. The last never does.
        workers: The workers.
        schedule: Called with ``replicas``, the number of workers of each stage, as a keyword;
            returns a synchronous schedule: ``functools.partial(Schedule1F1B, 8)``.
        loss: See ``Pipe``.
        freeze: Says after each epoch how many layers are frozen; None to freeze by ``freeze`` only.
        costs: What stages are balanced by: a number for each layer, or a profile, of which the time
            counts. By default the bytes of the weights.
        max_kept_bytes: How much of the results of frozen layers each worker keeps at most; the
            others are computed each time. None for no limit.
        checkpoint: See ``Pipe``.
        reduction: See ``Pipe``.
        timeout: See ``Pipe``.

    Attributes:
        pipe: The pipeline, to measure it or to read its weights. Call ``step`` of this object.
        shape: Its present form.

    Raises:
        ArgumentTypeError: The model is no ``Sequential``.
        ConfigurationError: There are fewer than two layers, or costs for another number of layers;
            or see ``Pipe``.

    Example::

        schedule = functools.partial(Schedule1F1B, 8)
        freeze = FreezeFraction(1 / 3)
        with ElasticPipe(model, workers, schedule, cross_entropy, freeze=freeze) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.02)
            samples = Samples(len(images), batch=128)
            while samples.epoch < 10:
                for chosen in samples:
                    optimizer.zero_grad()
                    pipe.step(images[chosen], digits[chosen], samples=chosen)
                    optimizer.step()
                pipe.end_epoch()
    """

    def __init__(
        self,
        model: nn.Sequential,
        workers: Sequence[str],
        schedule: Callable[..., Schedules],
        loss: Callable[[Any, Any], Tensor],
        *,
        freeze: Freezing | None = None,
        costs: Profile | Sequence[float] | None = None,
        max_kept_bytes: int | None = None,
        checkpoint: Literal["never", "except_last", "always"] = "never",
        reduction: Literal["mean", "sum"] = "mean",
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        self._model = _checked(model)
        self._workers = tuple(workers)
        self._schedule = schedule
        self._freezing = freeze
        self._costs = _costs_of(model, costs)
        self._limit = largest_part(self._costs, min(len(self._workers), len(self._costs)))
        self._limit_s = limit_of(timeout, 60.0)
        self._epoch = 0
        self._max_kept_bytes = max_kept_bytes
        self.shape = self._shape(0, len(self._workers))
        self._make_stores(self._workers)
        self.pipe = Pipe(
            self._stages(self.shape),
            self._workers,
            schedule(replicas=self.shape.replicas),
            loss,
            checkpoint=checkpoint,
            reduction=reduction,
            timeout=timeout,
        )

    def _make_stores(self, workers: Iterable[str]) -> None:
        """Makes empty stores for the results of frozen layers."""
        self._stores = {
            get_worker_info(each).id: remote(each, ActivationStore, (self._max_kept_bytes,))
            for each in workers
        }
        self._homes: dict[int, tuple[int, int]] = {}

    # Stages

    def _shape(self, n_frozen: int, n_workers: int) -> Shape:
        """Returns the form for a number of frozen layers and of workers."""
        costs = self._costs[n_frozen:]
        length = choose_length(costs, n_workers, self._limit)
        cuts = tuple(n_frozen + cut for cut in balance(costs, length))
        return Shape(n_frozen, cuts, (n_workers // length,) * length)

    def _stages(self, shape: Shape) -> Stages:
        layers = _layers(self._model)
        bounds = [0, *shape.cuts, len(layers)]
        parts = [OrderedDict(layers[first:second]) for first, second in pairwise(bounds)]
        modules: list[Any] = [nn.Sequential(part) for part in parts]
        ties = find_ties(modules)
        for module in modules:
            module.training = self._model.training
        chain = Wiring.chain(len(parts), spreads=False)
        if shape.n_frozen:
            modules[0] = FrontMaker(
                parts[0], shape.n_frozen, self._model.training, self._stores, self._limit_s
            )
            first = tuple(Take(BATCH, key) for key in range(3))
            chain = Wiring((first, *chain.takes[1:]), spreads=False)
        return Stages(tuple(modules), chain, ties, has_names=True)

    def freeze(self, n_frozen: int) -> bool:
        """Freezes layers, and cuts the others again. Blocks.

        Args:
            n_frozen: How many layers are frozen from now on, from the first on.

        Returns:
            Whether anything changed.

        Raises:
            ConfigurationError: Fewer than now, or all of the layers; or a frozen layer shares a
                weight with one that is not.
            WorkerLost: A worker was lost; see ``resume``.
        """
        n_layers = len(self._costs)
        if not self.shape.n_frozen <= checked_int("n_frozen", n_frozen) < n_layers:
            raise ConfigurationError(
                f"n_frozen is {n_frozen}, of {n_layers} layers {self.shape.n_frozen} are frozen; "
                f"pass a number from {self.shape.n_frozen} to {n_layers - 1}"
            )
        if n_frozen == self.shape.n_frozen:
            return False
        _check_ties(self._model, n_frozen)
        shape = self._shape(n_frozen, len(self._workers))
        schedule = self._schedule(replicas=shape.replicas)
        self.pipe.repartition(self._stages(shape), schedule=schedule)
        self.shape = shape
        return True

    def end_epoch(self) -> bool:
        """Counts an epoch, and freezes as many layers as the rule says. Blocks.

        Returns:
            Whether the pipeline has another form now.

        Raises:
            WorkerLost: A worker was lost; see ``resume``.
        """
        self._epoch += 1
        if self._freezing is None:
            return False
        n_layers, norms = len(self._costs), self._norms()
        wanted = self._freezing.n_frozen(self._epoch, self.shape.n_frozen, norms)
        return self.freeze(min(max(wanted, self.shape.n_frozen), n_layers - 1))

    def _norms(self) -> list[float]:
        """Returns the norm of the gradients of each layer, infinite for one without weights."""
        squares = {
            name: 0.0 if any(True for _ in layer.parameters()) else math.inf
            for name, layer in _layers(self._model)
        }
        for name, value in self.pipe.squared_norms().items():
            squares[name.partition(".")[0]] += value
        return [math.sqrt(value) for value in squares.values()]

    # Training

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        return self._workers

    @property
    def table(self) -> Table:
        """The table that the workers run at present."""
        return self.pipe.table

    def optimizer(
        self, optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> PipeOptimizer:
        """Makes an optimizer for the weights that train; it stays valid. See ``Pipe.optimizer``."""
        return self.pipe.optimizer(optimizer_class, **options)

    def step(self, batch: Any, target: Any, *, samples: Tensor | None = None) -> Tensor:
        """Runs forward and backward of one batch; see ``Pipe.step``.

        Args:
            batch: The batch.
            target: Its target.
            samples: The number of each sample of the batch, int64, shape ``(batch,)``; samples with
                the same number have the same input each time. None if results of frozen layers
                are not to be kept.
        """
        loss = self.pipe.step_as_given(self._marked(batch, samples), target)
        if samples is not None:
            self._note(samples)
        return loss

    def __call__(self, batch: Any) -> Any:
        """Runs a forward of one batch without gradients; see ``Pipe``."""
        return self.pipe(self._marked(batch, None))

    def train(self, mode: bool = True) -> ElasticPipe:
        """Sets the training mode of all layers that are not frozen; returns the pipeline."""
        self.pipe.train(mode)
        return self

    def eval(self) -> ElasticPipe:
        """Sets the evaluation mode; returns the pipeline."""
        return self.train(False)

    def _marked(self, batch: Any, samples: Tensor | None) -> Any:
        """Returns a batch as the first stage takes it."""
        count = _n_rows(batch)
        if samples is None:
            samples = torch.full((count,), NOT_A_SAMPLE, device="cpu")
        elif not isinstance(samples, Tensor):
            raise wrong_type("samples", samples, "pass a tensor of numbers from 0 up, int64")
        elif samples.shape != (count,) or samples.dtype != torch.int64 or (samples < 0).any():
            raise ConfigurationError(
                f"samples has shape {tuple(samples.shape)} and type {samples.dtype} for a batch of "
                f"{count} rows; pass a number from 0 up for each, int64"
            )
        if not self.shape.n_frozen:
            return batch
        homes = [self._homes.get(sample, (NOWHERE, 0))[0] for sample in samples.tolist()]
        return batch, samples, torch.tensor(homes, device="cpu")

    def _note(self, samples: Tensor) -> None:
        """Notes which workers have results of these samples now."""
        depth, table = self.shape.n_frozen, self.pipe.table
        if not depth:
            return
        for number, part in enumerate(samples.tensor_split(table.n_microbatches)):
            worker = get_worker_info(self._workers[table.worker_of(0, number)]).id
            for sample in part.tolist():
                if self._homes.get(sample, (NOWHERE, 0))[1] < depth:
                    self._homes[sample] = worker, depth

    def usage(self) -> Usage:
        """Returns how much the workers keep of the results of frozen layers."""
        stores = [self._stores[get_worker_info(name).id] for name in self._workers]
        futures = [on(store).rpc_async(ActivationStore.usage) for store in stores]
        n_bytes, n_run = zip(*[future.wait() for future in futures], strict=True)
        names = self._workers
        return Usage(dict(zip(names, n_bytes, strict=True)), dict(zip(names, n_run, strict=True)))

    # Snapshots

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
    ) -> Snapshot:
        """Saves a snapshot; see ``Pipe.save``. Results of frozen layers are not in it."""
        own = _SavedShape(self.shape.n_frozen, self._epoch)
        return self.pipe.save(directory, step=step, state=self._tree(own, state), keep=keep)

    def _tree(self, own: _SavedShape, state: dict[str, Any] | None) -> dict[str, Any]:
        return {"elastic": own, "user": {} if state is None else state}

    def resume(
        self,
        directory: str | os.PathLike[str],
        *,
        state: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> Snapshot:
        """Goes on from a snapshot, on those of the workers that are not lost. Blocks.

        The layers are cut again for the workers that are left, and for the number of frozen layers
        that the snapshot has. The optimizer stays valid::

            try:
                pipe.step(images[chosen], digits[chosen], samples=chosen)
                optimizer.step()
            except WorkerLost:
                pipe.resume("snapshots", state={"samples": samples})

        Args:
            directory: Where ``save`` saved.
            state: Further state of the program; see ``Pipe.restore``.
            step: The snapshot after this many steps; by default the last snapshot.

        Raises:
            WorkerLost: All workers are lost, or another one was lost meanwhile: call it again.
            SnapshotNotFound: There is none.
            StateMismatch: It is of another model.
        """
        own = _SavedShape(0, 0)
        part = {"program": {"elastic": own}}
        restore_part(directory, part, step=step, strict=False, random_states=False)
        workers = _not_lost(self._workers)
        shape = self._shape(own.n_frozen, len(workers))
        # Layers that are frozen now may train again, and freeze with other weights.
        self._make_stores(workers)
        snapshot = self.pipe.resume(
            directory,
            self._stages(shape),
            workers,
            schedule=self._schedule(replicas=shape.replicas),
            state=self._tree(own, state),
            step=step,
        )
        self._workers, self.shape, self._epoch = workers, shape, own.epoch
        return snapshot

    def close(self) -> None:
        """Ends the pipeline, and releases all that the workers keep."""
        self.pipe.close()
        self._stores.clear()


def _checked(model: object) -> nn.Sequential:
    if not isinstance(model, nn.Sequential):
        raise wrong_type("model", model, "pass a Sequential, whose children freeze one by one")
    if len(model) < 2:
        raise ConfigurationError(f"the model has {len(model)} layers; pass two or more")
    return model


def _layers(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Returns the layers and their names; one that is in the model twice, twice."""
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]


def _costs_of(model: nn.Sequential, costs: Profile | Sequence[float] | None) -> list[float]:
    if isinstance(costs, Profile):
        costs = [layer.compute_seconds for layer in costs.layers]
    elif costs is None:
        costs = [
            sum(weight.numel() * weight.element_size() for weight in layer.parameters())
            for layer in model
        ]
    if len(costs) != len(model):
        raise ConfigurationError(
            f"there are costs for {len(costs)} layers, and the model has {len(model)}"
        )
    return list(costs)


def _check_ties(model: nn.Sequential, n_frozen: int) -> None:
    """Raises ConfigurationError if a weight is in a frozen layer and in another one."""
    layers = _layers(model)
    frozen = {weight: name for name, layer in layers[:n_frozen] for weight in layer.parameters()}
    for name, layer in layers[n_frozen:]:
        for weight in layer.parameters():
            if weight in frozen:
                raise ConfigurationError(
                    f"the layers {frozen[weight]!r} and {name!r} share a weight, and only the "
                    "first would be frozen; freeze fewer layers, or give each its own weight"
                )


def _n_rows(batch: Any) -> int:
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ConfigurationError("the batch has no tensor with the samples along dimension 0")


def _not_lost(workers: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the workers that are not lost.

    Raises:
        WorkerLost: All are lost.
    """
    errors = {each.worker.name: each.error for each in health() if each.state is WorkerState.LOST}
    names = tuple(workers)
    left = tuple(name for name in names if name not in errors)
    error = errors.get(names[0])
    if not left and error is not None:
        raise error
    return left


# What changes from epoch to epoch


class Samples:
    """The numbers of all samples in batches, each sample once an epoch, in a new order each time.

    The order follows from the seed and the epoch. ``state_dict`` has the place in it, so training
    resumes in the middle of an epoch, on any number of workers::

        while samples.epoch < 10:
            for chosen in samples:  # those that are left of this epoch
                pipe.step(images[chosen], digits[chosen], samples=chosen)

    Args:
        count: The number of samples.
        batch: The samples of a batch; those left over from whole batches are not seen in the epoch.
        seed: Where random numbers start.

    Raises:
        ConfigurationError: There are fewer samples than a batch has.
    """

    def __init__(self, count: int, batch: int, seed: int = 0) -> None:
        self._count = checked_int("count", count)
        self._batch = checked_int("batch", batch)
        self._seed = checked_int("seed", seed)
        if not 1 <= self._batch <= self._count:
            raise ConfigurationError(
                f"batch is {batch} and there are {count} samples; pass a batch of 1 to {count}"
            )
        self.epoch = 0
        self._n_batches = 0
        self._ordered: tuple[int, int, Tensor] = (seed, -1, torch.empty(0, device="cpu"))

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self._count // self._batch

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the batches that are left of this epoch, int64, shape ``(batch,)``.

        A batch counts as done as soon as it is yielded. If a state is loaded meanwhile, the next
        batch follows from that.
        """
        while self._n_batches < len(self):
            first = self._n_batches * self._batch
            self._n_batches += 1
            yield self._order()[first : first + self._batch]
        self.epoch, self._n_batches = self.epoch + 1, 0

    def _order(self) -> Tensor:
        if self._ordered[:2] != (self._seed, self.epoch):
            # torch's generator takes 32 bits of a seed.
            seed = random.Random((self._seed << 32) + self.epoch).getrandbits(32)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self._count, generator=generator, device="cpu")
            self._ordered = (self._seed, self.epoch, order)
        return self._ordered[2]

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the epoch, and the seed."""
        return {"epoch": self.epoch, "batches": self._n_batches, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place, and the seed."""
        self.epoch, self._n_batches = state["epoch"], state["batches"]
        self._seed = state["seed"]


class Freezing(Protocol):
    """Says how many layers, from the first on, are frozen after an epoch."""

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on.

        Args:
            epoch: How many epochs have been done.
            n_frozen: How many layers are frozen already; a smaller result counts as this number.
            norms: The norm of the gradients of each layer in the last step: 0 for frozen layers,
                infinite for those without weights.
        """


@dataclass(frozen=True)
class FreezeFraction:
    """Freezes a fraction of the layers that still train, at fixed epochs.

    Args:
        fraction: The fraction, above 0 and below 1; a part of a layer is rounded down.
        first: The epoch after which layers are frozen for the first time.
        every: Epochs between two times.

    Raises:
        ConfigurationError: A number is out of range.
    """

    fraction: float = 1 / 3
    first: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        if self.first < 1 or self.every < 1:
            raise ConfigurationError(
                f"first is {self.first} and every is {self.every}; pass numbers of epochs, 1 or "
                "more"
            )

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        if epoch < self.first or (epoch - self.first) % self.every:
            return n_frozen
        return _grown(n_frozen, len(norms), self.fraction)


@dataclass(frozen=True)
class FreezeByNorm:
    """Freezes up to the layer whose gradient is smallest, and at most a fraction at a time.

    Args:
        fraction: The largest fraction of the layers that still train, above 0 and below 1.

    Raises:
        ConfigurationError: The fraction is out of range.
    """

    fraction: float = 1 / 3

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        smallest = min(range(n_frozen, len(norms)), key=norms.__getitem__)
        return min(_grown(n_frozen, len(norms), self.fraction), smallest)


@dataclass(frozen=True)
class FreezeAt:
    """Freezes given numbers of layers after given epochs.

    Args:
        layers: By epoch, the number of frozen layers.
    """

    layers: Mapping[int, int]

    def n_frozen(self, epoch: int, n_frozen: int, norms: Sequence[float]) -> int:
        """Returns the number of frozen layers from now on."""
        return max(n_frozen, self.layers.get(epoch, 0))


def _grown(n_frozen: int, n_layers: int, fraction: float) -> int:
    return n_frozen + int((n_layers - n_frozen) * fraction + 1e-9)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigurationError(f"fraction is {fraction}; pass a number above 0 and below 1")


def largest_part(costs: Sequence[float], n_parts: int) -> float:
    """Returns the cost of the largest part if layers are cut as evenly as possible."""
    bounds = [0, *balance(costs, n_parts), len(costs)]
    return max(sum(costs[first:second]) for first, second in pairwise(bounds))


def choose_length(costs: Sequence[float], n_workers: int, limit: float) -> int:
    """Returns the number of stages for the layers that still train.

    It is the smallest number for which no stage costs more than ``limit``. It divides the number of
    workers, so that each stage has the same number of replicas.

    Args:
        costs: The costs of the layers that still train.
        n_workers: The number of workers.
        limit: The cost of the largest stage when nothing was frozen.
    """
    lengths = [each for each in range(1, n_workers + 1) if n_workers % each == 0]
    possible = [each for each in lengths if each <= len(costs)]
    fitting = (each for each in possible if largest_part(costs, each) <= limit * (1 + 1e-9))
    return next(fitting, possible[-1])
