"""The workers that a plan is made for: their links and their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchweft.pipeline.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers of equal speed in a fixed order; stages take them in this order.

    Attributes:
        n_workers: Number of workers.
        bandwidth: Bytes per second of a link between two workers, in one direction;
            ``math.inf`` for links that cost nothing.
        memory_bytes: Memory that a plan may use on each worker: one number for all, a tuple with a
            number for each, or None for no limit.
        workers_per_host: Workers 0 to ``workers_per_host - 1`` are on the first host, and so on;
            None if all links are alike.
        host_bandwidth: Bytes per second between workers of different hosts, at most ``bandwidth``.

    Raises:
        PartitionError: If a number is out of its range, or a limit is missing.
    """

    n_workers: int
    bandwidth: float
    memory_bytes: int | tuple[int, ...] | None = None
    workers_per_host: int | None = None
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, list):
            object.__setattr__(self, "memory_bytes", tuple(self.memory_bytes))
        if self.n_workers < 1:
            raise PartitionError(f"the cluster has {self.n_workers} workers; it needs at least one")
        if not self.bandwidth > 0:
            raise PartitionError(f"the bandwidth is {self.bandwidth} bytes/s; it must exceed 0")
        self._check_hosts()
        self._check_memory()

    def _check_hosts(self) -> None:
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

    def _check_memory(self) -> None:
        if isinstance(self.memory_bytes, tuple) and len(self.memory_bytes) != self.n_workers:
            raise PartitionError(
                f"memory_bytes has {len(self.memory_bytes)} limits for {self.n_workers} workers; "
                "give one for each, or one number for all"
            )
        for worker in range(self.n_workers):
            limit = self.limit(range(worker, worker + 1))
            if not limit >= 0:
                raise PartitionError(f"worker {worker} has a memory limit of {limit} bytes")

    @property
    def is_uniform(self) -> bool:
        """Whether it makes no difference which of the workers a stage takes."""
        return self.workers_per_host is None and not isinstance(self.memory_bytes, tuple)

    def bandwidth_among(self, workers: range) -> float:
        """Returns the bandwidth of the slowest link between two of ``workers``."""
        if self.workers_per_host is None or self.host_bandwidth is None:
            return self.bandwidth
        hosts = workers[0] // self.workers_per_host, workers[-1] // self.workers_per_host
        return self.bandwidth if hosts[0] == hosts[1] else self.host_bandwidth

    def limit(self, workers: range) -> float:
        """Returns the smallest memory limit of ``workers``, infinite if there is none."""
        if isinstance(self.memory_bytes, tuple):
            return min(self.memory_bytes[workers.start : workers.stop])
        return math.inf if self.memory_bytes is None else self.memory_bytes
