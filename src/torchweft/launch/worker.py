"""Defines what the launcher needs to start a worker: name, environment, port, seed, metrics.

A forked process inherits its parent's random number generators and their state. Python reseeds its
own after a fork. The generators of NumPy and PyTorch would produce the same numbers in every
worker, so ``seed_generators`` seeds them in each.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchweft.arguments import checked_int
from torchweft.errors import ConfigurationError
from torchweft.ids import check_worker_name
from torchweft.probe import usable_cores
from torchweft.scraping import VARIABLE, Address, check_free, check_package

MOST_WORKERS = 1 << 16
"""No launcher could start more: each is a process."""


@dataclass(frozen=True)
class WorkerSpec:
    """Describes one worker process before it is started.

    Attributes:
        name: The worker's name; unique in the group.
        rank: Its rank in the group.
        job: What the process does: a dictionary made by ``torchweft.launch.job``.
        environment: All of its environment variables.
        notes: The folder for the note that tells other workers how it ended; see
            ``torchweft.deaths``.
        directory: The directory that it starts in.
    """

    name: str
    rank: int
    job: dict[str, object]
    environment: Mapping[str, str]
    notes: str
    directory: str = field(default_factory=os.getcwd)


@dataclass(frozen=True)
class WorkerExit:
    """Describes how a worker process ended.

    Attributes:
        name: The worker's name.
        rank: Its rank.
        pid: Its process id.
        exit_code: Its exit status, or the negative number of the signal that killed it.
        ended_at: When it ended, in seconds since the epoch.
        ran_s: How long it had run, in seconds.
        is_memory_kill: Whether the kernel killed it for lack of memory; None if unknown.
        loss: The loss of its host that ended it; empty if its host was not lost.
    """

    name: str
    rank: int
    pid: int
    exit_code: int
    ended_at: float = 0.0
    ran_s: float = 0.0
    is_memory_kill: bool | None = None
    loss: str = ""


def worker_names(count: int, names: Sequence[str] | None, prefix: str = "worker") -> list[str]:
    """Returns one name for each worker, after checking the requested names.

    Raises:
        ConfigurationError: The names cannot be used; the message says what would work.
    """
    if count < 1:
        raise ConfigurationError(f"the number of workers is {count}; it must be at least 1")
    if count > MOST_WORKERS:
        raise ConfigurationError(
            f"the number of workers is {count}; it must be at most {MOST_WORKERS}"
        )
    if names is None:
        made = [f"{prefix}{number}" for number in range(count)]
        check_worker_name(made[-1])
        return made
    if any(not name.strip() for name in names):
        raise ConfigurationError(
            f"a worker name is empty in {','.join(names)!r}; write them like ps,trainer0,trainer1"
        )
    if len(names) != count:
        raise ConfigurationError(
            f"{len(names)} names for {count} workers; give one name for each worker"
        )
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigurationError(
            f"worker name {repeated[0]!r} is given twice; every worker needs a name of its own"
        )
    for name in names:
        check_worker_name(name)
    return list(names)


def threads_per_worker(count: int) -> int:
    """Returns how many compute threads each of ``count`` workers gets on this machine."""
    return max(1, len(usable_cores()) // count)


def compute_environment(base: Mapping[str, str], count: int) -> dict[str, str]:
    """Returns ``base`` with defaults that suit one of ``count`` workers on this machine.

    Workers that each start a thread per core slow each other down, and buffered output would
    arrive late and in bursts. Values that the user has set are kept.
    """
    environment = dict(base)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_worker(count)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def identity_environment(
    name: str, rank: int, count: int, restarts: int = 0, local_rank: int | None = None
) -> dict[str, str]:
    """Returns the variables that tell one of ``count`` workers its identity.

    Args:
        name: Its name.
        rank: Its rank.
        count: How many workers are started on this machine.
        restarts: How often it has been restarted.
        local_rank: Its number among the workers of this machine; by default its rank.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "LOCAL_WORLD_SIZE": str(count),
        "WEFT_WORKER_NAME": name,
        "WEFT_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),  # read by scripts for torchrun
    }


# The port at which workers meet


class HeldPort:
    """A port of this host that no other program is given before the worker of rank 0 listens there.

    If a port from the kernel were released, any program could take it until the first worker has
    started and listens, seconds later. So the socket stays bound, but does not listen. It and the
    worker's socket allow address reuse, and only the worker's listens, so Linux lets the worker
    listen on the port. The kernel gives the port to no program that asks for a free port.

    Args:
        address: The address at which the worker will listen; empty for all.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._holding: socket.socket | None = None

    def take(self, number: int = 0) -> int:
        """Returns a port, which is held from now on, and releases the former one.

        Args:
            number: The port; 0 lets the kernel choose.

        Raises:
            OSError: Another program listens on that port.
        """
        holding = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holding.bind((self._address, number))
        except OSError:
            holding.close()
            raise
        self.close()
        self._holding = holding
        port: int = holding.getsockname()[1]
        return port

    def close(self) -> None:
        """Releases the port; idempotent."""
        if self._holding is not None:
            self._holding.close()


# Random numbers

_NUMPY_BITS = 32
"""Bits of the seeds that NumPy's legacy generator takes."""


def check_seed(seed: int | None) -> None:
    """Raises ConfigurationError if the seed is invalid."""
    if seed is None:
        return
    if checked_int("seed", seed) < 0:
        raise ConfigurationError(f"seed is {seed}; it must be 0 or more")


def worker_seed(seed: int | None, name: str) -> int | None:
    """Returns the seed of one worker of a run: 63 bits, different for each name.

    Args:
        seed: The seed of the run; None if it has no seed.
        name: The worker's name.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int | None) -> None:
    """Seeds Python's generator, and those of NumPy and PyTorch if they have been imported.

    Args:
        seed: The worker's seed; None seeds each generator from the operating system.
    """
    loaded: dict[str, Any] = sys.modules
    random.seed(seed)
    if "numpy" in loaded and (seed is not None or "numpy.random" in loaded):
        # Without a seed, NumPy's generator seeds itself if it is imported later.
        import numpy

        numpy.random.seed(None if seed is None else seed % (1 << _NUMPY_BITS))
    if "torch" in loaded:
        torch = loaded["torch"]
        if seed is None:
            torch.seed()
        else:
            torch.manual_seed(seed)


# Metrics

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Scrapes:
    """Where each worker of a run serves its metrics.

    Attributes:
        address: The address, and the first port.
        local_ranks: Each worker's number among those of its host. The worker adds it to its port.
        shift: Added to all ports.
        by_rank: Whether several hosts of the launcher may be one machine, so that the port is
            numbered by rank.
    """

    address: Address
    local_ranks: Mapping[str, int]
    shift: int = 0
    by_rank: bool = False

    def __post_init__(self) -> None:
        for name in self.local_ranks:
            self.of(name)

    def of(self, name: str) -> Address:
        """Returns the address of a worker."""
        ranks = list(self.local_ranks)
        number = ranks.index(name) if self.by_rank else self.local_ranks[name]
        return self.address.plus(self.shift + number)

    def variables(self, name: str) -> dict[str, str]:
        """Returns the variable that tells a worker the port for local rank 0."""
        return {VARIABLE: str(self.of(name).plus(-self.local_ranks[name]))}

    def check_here(self) -> None:
        """Checks that the workers, all on this host, can serve.

        Raises:
            ConfigurationError: The extra is missing, or an address cannot be listened at.
        """
        check_package()
        check_free(map(self.of, self.local_ranks))

    def text(self, hosts: Mapping[str, tuple[str, str]] | None = None) -> str:
        """Returns where to scrape, as text.

        Args:
            hosts: Name and address of each worker's host; None if that is this one.
        """
        shown = [self._text_of(name, hosts) for name in list(self.local_ranks)[:_MOST_SHOWN]]
        left = len(self.local_ranks) - len(shown)
        more = f", and {left} more at the ports that follow" if left else ""
        return f"metrics: {', '.join(shown)}{more}"

    def _text_of(self, name: str, hosts: Mapping[str, tuple[str, str]] | None) -> str:
        address = self.of(name)
        if hosts is None:
            return f"{name} {address.url}"
        host, reached_at = hosts[name]
        if address.is_loopback:
            return f"{name} {address.url} on {host}"
        if address.is_unspecified:
            address = address._replace(host=reached_at)
        return f"{name} {address.url}"
