"""The input of the planner, and the time and the memory of a stage: all formulas are here.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1, for asynchronous schedules. For a stage with r replicas, B bytes per second,
micro-batches that compute for T seconds (forward and backward of all layers of the stage), and w
bytes of weights, the paper takes

    load  =  1/r · max(T, 2 (r - 1) w / B)        a link with a bytes:  2 a / B

and minimises the largest load of a stage or link: that is the time between two micro-batches in
steady state. (The authors' program differs: it adds 4 (r - 1) / r · w / B to T instead of taking
the maximum.) ``Execution`` refines this where the schedules of Weft differ from the paper's:

==================  ===========================================  ===================================
schedule            load of a stage; link of X = 2 a / B          predicted time of a step
==================  ===========================================  ===================================
pipedream-stashing  max(T / r, V / r); X                          max load
1f1b, gpipe         (⌈M / r⌉ - 1) T + V; (M - 1) X                Σ T + Σ X + max load
==================  ===========================================  ===================================

M is the number of micro-batches of a step. V is the time of one exchange of gradients, the paper's
2 (r - 1) w / B: one replica receives from all others and answers them. Micro-batches that share an
exchange divide its time: r of them with weight stashing, which updates once each replica has
computed one. In a
synchronous step the pipeline fills and drains: one micro-batch passes all stages and links, the
other micro-batches add the load of the slowest, and its exchange comes last, hidden by nothing.

Memory of a worker: (versions + 1) · weights + optimizer state + fixed + in flight · saved. The
added copy is the gradient. With n workers in this stage and all later stages, in flight is ⌈n / r⌉
as in PipeDream, at most ⌈M / r⌉ in a synchronous step, and ⌈M / r⌉ for GPipe. Versions: 1 in a
synchronous schedule; as many as in flight with weight stashing.

Approximations:

- Workers are equally fast, and as fast as where the profile was measured. Time and memory of a
  stage are the sums over its layers: a tensor that two neighbours save counts twice.
- In asynchronous schedules communication hides behind computation entirely, as in the paper; in
  synchronous ones links work beside the workers, but the exchange does not. Every link has its full
  bandwidth, whatever the other links do. Latency and the loss are free.
- A link counts for each micro-batch alone, also between stages with several replicas (the paper).
- Replicas never wait for micro-batches of other replicas. With the in-flight numbers above they do
  in 1F1B, where a stage has more replicas than both its neighbours: 1-4-1 may take more than twice
  the predicted time. Playing its table through shows that.
- A synchronous step of stages with one replica, and links that cost nothing: exact for even
  stages. For uneven ones whose backward pass takes the same multiple of the forward pass, exact for
  GPipe, and up to a third too long for 1F1B. Where that multiple differs, it may be too short.
- Memory is that of tensors: no fragmentation, no workspaces, no messages under way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from torchweft import columns
from torchweft.pipeline.errors import PartitionError

ScheduleName: TypeAlias = Literal["1f1b", "gpipe", "pipedream-stashing"]
Array: TypeAlias = NDArray[np.float64]
Number: TypeAlias = Any
"""A float or an array of floats: each formula is written once, for one stage and for all stages."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Time and memory of one layer for one micro-batch.

    Attributes:
        name: Name for tables and errors, such as ``"0:Conv2d"``.
        forward_seconds: Time of the forward pass.
        backward_seconds: Time of the backward pass, for gradients of input and weights.
        activation_bytes: Size of the output, which is sent if the next layer is on another worker.
            The gradient that comes back has the same size.
        saved_bytes: Activations that the backward pass needs, held from forward to backward.
        weight_bytes: Size of the parameters that are trained.
        fixed_bytes: Size of frozen parameters and buffers: held once, never exchanged.
        optimizer_ratio: Bytes of optimizer state for each byte of ``weight_bytes``, such as 2 for
            Adam, 1 for SGD with momentum; None if not known, which counts as 0.

    Raises:
        PartitionError: If a number is negative, infinite or not a number.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    saved_bytes: int
    weight_bytes: int
    fixed_bytes: int = 0
    optimizer_ratio: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PartitionError(
                    f"layer {self.name!r} has {field.name}={value}; it must be finite, 0 or more"
                )

    @property
    def compute_seconds(self) -> float:
        """Time of forward and backward pass together."""
        return self.forward_seconds + self.backward_seconds

    @property
    def optimizer_bytes(self) -> int:
        """Size of the optimizer's state, rounded up; 0 if not known."""
        return math.ceil(self.weight_bytes * (self.optimizer_ratio or 0))


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model in order, as measured by ``profile`` or written by hand.

    Attributes:
        layers: The layers; at least one.
        batch_size: Number of samples in the micro-batch that was measured.

    Raises:
        PartitionError: If there is no layer, or the batch is empty.
    """

    layers: tuple[LayerProfile, ...]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise PartitionError("the profile has no layers; it needs at least one")
        if self.batch_size < 1:
            raise PartitionError(
                f"the profile has batch_size={self.batch_size}; it must be 1 or more samples"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers of equal speed in a fixed order; stages take them in this order.

    Attributes:
        n_workers: Number of workers.
        bandwidth: Bytes per second of a link between two workers, in one direction;
            ``math.inf`` for links that cost nothing.
        memory_bytes: Memory that a plan may use on each worker; None for no limit.
        workers_per_host: Workers 0 to ``workers_per_host - 1`` are on the first host, and so on;
            None if all links are alike.
        host_bandwidth: Bytes per second between workers of different hosts, at most ``bandwidth``.

    Raises:
        PartitionError: If a number is out of its range, or a limit is missing.
    """

    n_workers: int
    bandwidth: float
    memory_bytes: int | None = None
    workers_per_host: int | None = None
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.n_workers < 1:
            raise PartitionError(f"the cluster has {self.n_workers} workers; it needs at least one")
        if not self.bandwidth > 0:
            raise PartitionError(f"the bandwidth is {self.bandwidth} bytes/s; it must exceed 0")
        if self.memory_bytes is not None and not self.memory_bytes >= 0:
            raise PartitionError(f"a worker has a memory limit of {self.memory_bytes} bytes")
        if (self.workers_per_host is None) != (self.host_bandwidth is None):
            raise PartitionError(
                f"workers_per_host={self.workers_per_host} and host_bandwidth="
                f"{self.host_bandwidth}: give both, or none if all links are alike"
            )
        if self.workers_per_host is not None and self.workers_per_host < 1:
            raise PartitionError(f"workers_per_host={self.workers_per_host} must be 1 or more")
        if self.host_bandwidth is not None and not 0 < self.host_bandwidth <= self.bandwidth:
            raise PartitionError(
                f"host_bandwidth={self.host_bandwidth} bytes/s must exceed 0 and be at most the "
                f"bandwidth within a host, {self.bandwidth}"
            )

    def bandwidth_among(self, workers: range) -> float:
        """Returns the bandwidth of the slowest link between two of ``workers``."""
        if self.workers_per_host is None or self.host_bandwidth is None:
            return self.bandwidth
        hosts = workers[0] // self.workers_per_host, workers[-1] // self.workers_per_host
        return self.bandwidth if hosts[0] == hosts[1] else self.host_bandwidth

    @property
    def limit(self) -> float:
        """The memory limit of each worker, infinite if there is none."""
        return math.inf if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Execution:
    """How a plan is executed, as far as its costs depend on it.

    Attributes:
        schedule: Kind of the schedule.
        n_microbatches: Micro-batches of one step; 1 where each minibatch is a step.
    """

    schedule: ScheduleName
    n_microbatches: int

    @classmethod
    def checked(cls, schedule: str, n_microbatches: int | None) -> Execution:
        """Returns an execution; raises ``PartitionError`` if a part of it cannot be."""
        if schedule not in get_args(ScheduleName):
            raise PartitionError(
                f"schedule {schedule!r} is none of {', '.join(get_args(ScheduleName))}"
            )
        if schedule == "pipedream-stashing" and n_microbatches not in (None, 1):
            raise PartitionError(
                f"n_microbatches={n_microbatches}, but each minibatch is a step of "
                "pipedream-stashing; leave it out"
            )
        if schedule != "pipedream-stashing" and n_microbatches is None:
            raise PartitionError(f"schedule {schedule!r} needs n_microbatches, those of one step")
        if n_microbatches is not None and n_microbatches < 1:
            raise PartitionError(f"n_microbatches={n_microbatches} must be 1 or more")
        return cls(cast(ScheduleName, schedule), n_microbatches or 1)

    @property
    def is_synchronous(self) -> bool:
        """Whether the pipeline is empty between two steps."""
        return self.schedule in ("1f1b", "gpipe")

    def exchange_seconds(self, weight_bytes: Number, replicas: int, bandwidth: float) -> Number:
        """Returns the time in which ``replicas`` exchange their gradients once."""
        return 2 * (replicas - 1) * weight_bytes / bandwidth

    def load_parts(
        self, compute: Number, exchange: Number, link: Number, replicas: int
    ) -> tuple[Number, Number, Number]:
        """Returns what computation, exchange and links add to the load of a stage."""
        if self.is_synchronous:
            repeats = math.ceil(self.n_microbatches / replicas) - 1
            return repeats * compute, exchange, (self.n_microbatches - 1) * link
        return compute / replicas, exchange / replicas, link

    def load(self, parts: tuple[Number, Number, Number]) -> Number:
        """Returns the load that ``load_parts`` make together."""
        compute, exchange, link = parts
        work = compute + exchange if self.is_synchronous else np.maximum(compute, exchange)
        return np.maximum(work, link)

    def step_seconds(self, largest_load: float, compute: float, links: float) -> float:
        """Returns the time of a step; ``compute`` and ``links`` are sums over the pipeline."""
        if self.is_synchronous:
            return compute + links + largest_load
        return self.n_microbatches * largest_load

    def in_flight(self, n_workers: int, replicas: int) -> int:
        """Returns for how many micro-batches a replica holds activations at once.

        Args:
            n_workers: Workers of this stage and all later stages.
            replicas: Workers of this stage.
        """
        pipeline, step = math.ceil(n_workers / replicas), math.ceil(self.n_microbatches / replicas)
        if self.schedule == "gpipe":
            return step
        return min(pipeline, step) if self.schedule == "1f1b" else pipeline

    def refusal(self, replicas: int) -> str:
        """Returns why a stage cannot have so many replicas; empty if it can."""
        if self.is_synchronous and replicas > self.n_microbatches:
            return f"each replica needs one of the {self.n_microbatches} micro-batches"
        return ""

    def versions(self, in_flight: int) -> int:
        """Returns how many versions of its weights a worker holds."""
        return 1 if self.is_synchronous else in_flight


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage is predicted to cost.

    Attributes:
        forward_seconds: Forward pass of one micro-batch on one replica.
        backward_seconds: Backward pass of one micro-batch on one replica.
        exchange_seconds: One exchange of gradients among the replicas.
        transfer_seconds: Output to the next stage and its gradient back, for one micro-batch.
        load_seconds: Time of the step beyond the first micro-batch, as far as this stage decides;
            in an asynchronous schedule, the time between two micro-batches.
        limited_by: What makes most of the load: compute, exchange or transfer.
        in_flight: Micro-batches for which a replica holds activations at once.
        versions: Versions of the weights that a replica holds.
        weight_bytes: All versions of the weights, and fixed tensors.
        gradient_bytes: Gradients of the weights.
        optimizer_bytes: State of the optimizer, as far as it is known.
        is_optimizer_known: Whether it is known for all layers with weights.
        activation_bytes: Saved activations of all micro-batches in flight.
        limit_bytes: Memory that each of the workers may use; None for no limit.
    """

    forward_seconds: float
    backward_seconds: float
    exchange_seconds: float
    transfer_seconds: float
    load_seconds: float
    limited_by: str
    in_flight: int
    versions: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    is_optimizer_known: bool
    activation_bytes: int
    limit_bytes: int | None

    @property
    def compute_seconds(self) -> float:
        """Forward and backward pass of one micro-batch on one replica."""
        return self.forward_seconds + self.backward_seconds

    @property
    def cells(self) -> list[str]:
        """The costs as text, for a table."""
        seconds = (
            self.compute_seconds,
            self.exchange_seconds,
            self.transfer_seconds,
            self.load_seconds,
        )
        limit = "none" if self.limit_bytes is None else bytes_text(self.limit_bytes)
        memory = bytes_text(self.memory_bytes)
        return [
            *map(seconds_text, seconds),
            self.limited_by,
            str(self.in_flight),
            str(self.versions),
            memory if self.is_optimizer_known else f"{memory} + optimizer",
            limit,
        ]

    @property
    def memory_bytes(self) -> int:
        """All memory that one worker of the stage needs."""
        held = self.weight_bytes + self.gradient_bytes + self.activation_bytes
        return held + self.optimizer_bytes


class CostModel:
    """The costs of every stage that a model, a cluster and an execution allow.

    Matrices have a row for the first layer of a stage, and a column for the first layer after it:
    shape ``(n_layers + 1, n_layers + 1)``; entries that are no stage are infinite.
    """

    def __init__(self, profile: Profile, cluster: Cluster, execution: Execution) -> None:
        self.profile, self.cluster, self.execution = profile, cluster, execution
        layers = profile.layers
        self.n_layers = len(layers)
        self._compute = _sums([layer.compute_seconds for layer in layers])
        self._weights = _sums([layer.weight_bytes for layer in layers])
        self._held = _sums([layer.optimizer_bytes + layer.fixed_bytes for layer in layers])
        self._saved = _sums([layer.saved_bytes for layer in layers])
        self._cut = np.array([0, *(layer.activation_bytes for layer in layers[:-1]), 0], float)
        self._loads: dict[tuple[int, float, float], Array] = {}
        self._memories: dict[int, Array] = {}

    def loads(self, workers: range) -> Array:
        """Returns the loads of stages on ``workers``, as a matrix."""
        key = len(workers), *self._bandwidths(workers)
        if key not in self._loads:
            cuts = self._cut[:, None], self._cut
            parts = self._parts(self._compute, self._weights, *cuts, workers)
            self._loads[key] = _stages_only(self.execution.load(parts))
        return self._loads[key]

    def fitting_loads(self, workers: range, n_workers: int) -> Array:
        """Returns the loads of stages on ``workers``, infinite where their memory is too small.

        Args:
            workers: The workers of the stage.
            n_workers: Number of workers of this stage and all later stages.
        """
        loads, limit = self.loads(workers), self.cluster.limit
        if limit == math.inf:
            return loads
        return np.where(self._memory(workers, n_workers) <= limit, loads, math.inf)

    def excesses(self, workers: range, n_workers: int) -> Array:
        """Returns by how many bytes stages exceed the memory; arguments as ``fitting_loads``."""
        limit = min(self.cluster.limit, sys.float_info.max)
        excesses: Array = self._memory(workers, n_workers) - limit
        return excesses

    def transfers(self, workers: range) -> Array:
        """Returns the time from a stage on ``workers`` to the next and back, for each cut.

        It is that of the first micro-batch, which goes to the first replica of every stage.
        """
        return 2 * self._cut / self._bandwidths(workers)[1]

    def stage(self, layers: range, workers: range, n_workers: int) -> StageCost:
        """Returns the costs of one stage; ``n_workers`` as for ``fitting_loads``.

        Raises:
            PartitionError: If the schedule does not allow so many replicas.
        """
        profiles = self.profile.layers[layers.start : layers.stop]
        forward = sum(layer.forward_seconds for layer in profiles)
        backward = sum(layer.backward_seconds for layer in profiles)
        weights = sum(layer.weight_bytes for layer in profiles)
        if refusal := self.execution.refusal(len(workers)):
            raise PartitionError(
                f"layers {span_text(layers)} cannot be a stage with {len(workers)} replicas: "
                f"{refusal}"
            )
        cuts = self._cut[layers.start], self._cut[layers.stop]
        parts = self._parts(forward + backward, weights, *cuts, workers)
        bandwidth = self.cluster.bandwidth_among(workers)
        in_flight = self.execution.in_flight(n_workers, len(workers))
        versions = self.execution.versions(in_flight)
        is_known = all(p.optimizer_ratio is not None or not p.weight_bytes for p in profiles)
        limit = self.cluster.limit
        return StageCost(
            forward_seconds=float(forward),
            backward_seconds=float(backward),
            exchange_seconds=self.execution.exchange_seconds(weights, len(workers), bandwidth),
            transfer_seconds=float(self.transfers(workers)[layers.stop]),
            load_seconds=float(self.execution.load(parts)),
            limited_by=("compute", "exchange", "transfer")[int(np.argmax(parts))],
            in_flight=in_flight,
            versions=versions,
            weight_bytes=versions * weights + sum(layer.fixed_bytes for layer in profiles),
            gradient_bytes=weights,
            optimizer_bytes=sum(layer.optimizer_bytes for layer in profiles),
            is_optimizer_known=is_known,
            activation_bytes=in_flight * sum(layer.saved_bytes for layer in profiles),
            limit_bytes=None if limit == math.inf else int(limit),
        )

    def _memory(self, workers: range, n_workers: int) -> Array:
        in_flight = self.execution.in_flight(n_workers, len(workers))
        if in_flight not in self._memories:
            copies = self.execution.versions(in_flight) + 1
            needed = copies * self._weights + self._held + in_flight * self._saved
            self._memories[in_flight] = _stages_only(needed)
        return self._memories[in_flight]

    def _parts(
        self, compute: Number, weights: Number, before: Number, after: Number, workers: range
    ) -> tuple[Number, Number, Number]:
        """Returns the parts of the load of stages that receive and send so many bytes."""
        inner, outer = self._bandwidths(workers)
        exchange = self.execution.exchange_seconds(weights, len(workers), inner)
        link = 2 * np.maximum(before / inner, after / outer)
        return self.execution.load_parts(compute, exchange, link, len(workers))

    def _bandwidths(self, workers: range) -> tuple[float, float]:
        """Returns the slowest bandwidth among replicas, and with the next stage's first as well.

        A link between stages is as slow as its slowest pair of replicas. A pair is on two hosts
        only if the first stage's replicas and the next one are, or the next stage's replicas are:
        each of the two stages charges its half, and the larger one counts.
        """
        inner = self.cluster.bandwidth_among(workers)
        return inner, self.cluster.bandwidth_among(range(workers.start, workers.stop + 1))


def _sums(values: list[Any]) -> Array:
    """Returns the sum of each range of values, as a matrix."""
    totals: Array = np.cumsum([0, *values], dtype=float)
    sums: Array = totals[None, :] - totals[:, None]
    return sums


def _stages_only(matrix: Array) -> Array:
    matrix[np.tri(len(matrix), dtype=bool)] = math.inf
    return matrix


# Text for people: seconds and bytes with units, and aligned tables

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def seconds_text(seconds: float) -> str:
    """Returns a time with three digits and a unit from ns to s, such as ``12.3 ms``."""
    if seconds == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * size or unit == "ns":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError("unreachable")


def bytes_text(count: int) -> str:
    """Returns a number of bytes with three digits and a binary unit, such as ``1.50 GiB``."""
    if count < 1024:
        return f"{count} B" if count else "0"
    power = min((count.bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    return f"{_three_digits(count / 1024**power)} {_BINARY_UNITS[power]}"


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> str:
    """Returns lines with a column for each title; columns named in ``left`` are left-aligned."""
    return "\n".join(columns.aligned([header, *rows], [title in left for title in header]))


def layers_text(layers: range, names: Sequence[str]) -> str:
    """Returns a stage's layers, such as ``2-5 conv … pool``; ``names`` are theirs, or empty."""
    numbers = span_text(layers)
    if not names:
        return numbers
    return f"{numbers} {names[0]}" if len(names) == 1 else f"{numbers} {names[0]} … {names[-1]}"


def span_text(numbers: range) -> str:
    """Returns ``3`` for one number, ``3-5`` for several."""
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first}-{last}"


def _three_digits(value: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(value * 1.0005)))  # 9.996 becomes 10.0
    return f"{value:.{decimals}f}"
