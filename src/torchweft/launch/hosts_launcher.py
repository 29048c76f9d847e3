"""Runs and clusters over other hosts, for every launcher that can start a command there.

The workers' output, names, restarts of the group, reports and end are those of a local run: the
same code follows them. A new secret is made for each run; agents receive it over their standard
input, so it is in no argument list and no log.
"""

from __future__ import annotations

import os
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torchweft import knobs
from torchweft.errors import ConfigurationError, HostError
from torchweft.launch.clusters import Cluster
from torchweft.launch.hosts import Host, HostNurseries
from torchweft.launch.job import Job
from torchweft.launch.launchers import Launcher
from torchweft.launch.nursery import WARM_MODULES, WorkerSource
from torchweft.launch.run import Order, PortMeeting, Run
from torchweft.launch.terms import Terms
from torchweft.launch.worker import Scrapes
from torchweft.probe import own_address_towards
from torchweft.scraping import Address, check_package

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

_FORWARDED = ("WEFT_", "PYTHON", "OMP_", "TORCH_", "NCCL_", "GLOO_")
"""Beginnings of the variables of the launcher that workers of other hosts get as well."""

_OF_ONE_PROCESS = frozenset(
    (
        "WEFT_SECRET WEFT_SECRET_FILE WEFT_LISTEN WEFT_WORKER_NAME WEFT_INIT_METHOD "
        "WEFT_RESTART_COUNT WEFT_DEVICE WEFT_DEATH_NOTE"
    ).split()
)


class HostsLauncher(Launcher):
    """Starts workers on hosts; a subclass says on which, and how a command is started there.

    Attributes:
        python: The interpreter on the hosts; by default the path of this one.
    """

    python: str = sys.executable
    replaces_hosts: ClassVar[bool] = False
    """Whether a lost host can be asked for again, so that the restarts of a run cover it."""
    shares_machines: ClassVar[bool] = False
    """Whether several of its hosts may be one machine."""

    @abstractmethod
    def hosts(self, workers: int) -> Sequence[Host]:
        """Returns the hosts for a number of workers, in order of the workers' ranks.

        Raises:
            ConfigurationError: There is no place for so many workers.
        """

    def run(self, order: Order) -> int:
        """Runs a script in workers of the hosts; returns the exit status as shells do.

        Raises:
            HostError: A host cannot be reached or cannot start workers; nothing runs any more.
            ConfigurationError: An option does not work over hosts.
        """
        order.check_over_hosts()
        try:
            return self._run_on(self.hosts(len(order.names)), order)
        finally:
            self.release()

    def _run_on(self, hosts: Sequence[Host], order: Order) -> int:
        placed = place(order.names, hosts)
        local = local_places(placed)
        scrapes = self.scrapes(order.metrics, local)
        with (
            tempfile.TemporaryDirectory(prefix="weft-run-") as notes,
            closing(self.open(hosts, placed, order.preload, forwarded(os.environ))) as nurseries,
        ):
            nurseries.replaces_lost = self.replaces_hosts and order.restarts.limit > 0
            reserve = partial(nurseries.reserve_port, hosts[0])
            meeting = PortMeeting(
                len(order.names),
                order.master_port or reserve(),
                partial(nurseries.address_of, hosts[0]),
                None if order.master_port else reserve,
            )
            order = replace(order, job=_with_interpreter(order.job, self.python))
            run = Run(order, nurseries, {}, meeting, notes, local, scrapes)
            if scrapes is not None:
                at = {name: (host.name, host.address) for name, host in placed.items()}
                order.console.announce(f"torchweft run: {scrapes.text(at)}")
            return self.follow(run, nurseries, order)

    def scrapes(
        self, address: Address | None, local: Mapping[str, tuple[int, int]], shift: int = 0
    ) -> Scrapes | None:
        """Returns where workers with these places on their hosts serve their metrics."""
        if address is None:
            return None
        local_ranks = {name: local_rank for name, (local_rank, _) in local.items()}
        return Scrapes(address, local_ranks, shift, by_rank=self.shares_machines)

    def open(
        self,
        hosts: Sequence[Host],
        placed: Mapping[str, Host],
        preload: Sequence[str],
        environment: Mapping[str, str],
    ) -> HostNurseries:
        """Starts the agents of the hosts."""
        return HostNurseries(hosts, placed, preload=preload, environment=environment)

    def follow(self, run: Run, nurseries: HostNurseries, order: Order) -> int:
        """Follows a run to its end, and returns its exit status."""
        return run.to_the_end()

    def release(self) -> None:
        """Gives the hosts back when a run or cluster has ended; by default does nothing."""
        return

    def cluster(self, terms: Terms) -> Cluster:
        """Returns a cluster of workers on the hosts, around this process."""
        if terms.nursery is not None:
            raise ConfigurationError("nursery= is a process of this host; leave it out")
        return _HostsCluster(terms, self)


def _with_interpreter(job: Job, python: str) -> Job:
    """Returns a job that uses the interpreter of the hosts, if it names one."""
    arguments = job.get("arguments")
    if job["kind"] != "program" or not isinstance(arguments, list):
        return job
    return {**job, "arguments": [python, *arguments[1:]]}


def forwarded(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that workers of other hosts get from the launcher's environment."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_FORWARDED) and name not in _OF_ONE_PROCESS
    }


def place(names: Sequence[str], hosts: Sequence[Host]) -> dict[str, Host]:
    """Returns the host of each worker: the hosts are filled in order."""
    places = [host for host in hosts for _ in range(host.workers)]
    return dict(zip(names, places, strict=True))


def local_places(placed: Mapping[str, Host]) -> dict[str, tuple[int, int]]:
    """Returns each worker's number among those of its host, and how many these are."""
    counts: dict[str, int] = {}
    local: dict[str, tuple[int, int]] = {}
    for name, host in placed.items():
        local[name] = (counts.get(host.name, 0), host.workers)
        counts[host.name] = counts.get(host.name, 0) + 1
    return local


class _HostsCluster(Cluster):
    """A cluster whose workers are on other hosts; the caller hosts the store."""

    def __init__(self, terms: Terms, launcher: HostsLauncher) -> None:
        super().__init__(terms)
        self._launcher = launcher
        self._local: dict[str, tuple[int, int]] = {}
        self._secret = ""
        self._address = ""
        self._tcp_store: Any = None

    def _check_scrapes(self) -> None:
        if self._scrapes is not None:
            check_package()  # The ports are those of other hosts.

    def _make_nursery(self) -> WorkerSource:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        hosts = self._launcher.hosts(len(self.names))
        placed = place(self.names, hosts)
        self._local = local_places(placed)
        if self._scrapes is not None:
            former = self._scrapes
            self._scrapes = self._launcher.scrapes(former.address, self._local, former.shift)
        self._address = knobs.LISTEN.get() or own_address_towards(hosts[0].address)
        if not self._address:
            raise HostError(
                f"there is no route from here to host {hosts[0].address!r}; check the name, or set "
                "WEFT_LISTEN to the address at which the hosts reach this process",
                host=hosts[0].name,
            )
        self._environment = {}
        nurseries = self._launcher.open(
            hosts, placed, WARM_MODULES, self._terms.environment(forwarded(os.environ))
        )
        nurseries.replaces_lost = self._launcher.replaces_hosts and self._terms.restarts > 0
        self._nursery, self._secret = nurseries, nurseries.secret
        self._tcp_store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return nurseries

    def _environment_of(self, name: str, restarts: int) -> dict[str, str]:
        environment = super()._environment_of(name, restarts)
        local_rank, count = self._local[name]
        return environment | {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(count)}

    def _rendezvous(self) -> str:
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"tcp://{host}:{self._tcp_store.port}"

    def _meet(self, options: RpcBackendOptions) -> None:
        from torchweft.launch.cluster_store import ClusterStore
        from torchweft.secret import Secret

        options.secret, options.listen = Secret.from_text(self._secret), self._address
        store = self._tcp_store
        options.store = self._store = store if self._is_open else ClusterStore(store, self._failure)

    def _clean_up(self) -> None:
        super()._clean_up()
        self._tcp_store = None
        self._launcher.release()
