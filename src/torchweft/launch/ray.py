"""The launcher on Ray: workers in the bundles of one placement group.

Ray places the bundles, and an actor in each starts the host's agent and carries its input and
output. Everything else is Weft's own: marks, restarts and the end of a run are those of all
launchers. A lost actor or node is replaced in the same bundle, which Ray places anew. The restarts
of the run decide whether workers start there, as after any other death.

The secret of a run goes through a call of the actor. It is in no runtime environment, which Ray
shows in its dashboard, and in no argument list.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError
from torchweft.launch.hosts import Host
from torchweft.launch.hosts_launcher import HostsLauncher
from torchweft.launch.ray_bundles import ActorLink, Amounts, Bundles, package
from torchweft.launch.run import BROKEN_PIPE_STATUS, Order, output_closed

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
TIMEOUT_S = 60.0


class Ray(HostsLauncher):
    """Starts workers in a placement group of Ray.

    A process that has called ``ray.init``, or that is a job of Ray, uses that connection. Otherwise
    this connects, as ``ray.init`` does: with ``RAY_ADDRESS``, or with a cluster of this machine,
    or with one that it starts here and ends afterwards.

    Args:
        address: The cluster, as ``ray.init`` takes it: ``"host:6379"``; ``"auto"`` for one that
            must exist; ``"local"`` for one that is started here.
        num_cpus: CPUs that each worker reserves; also its number of compute threads, rounded
            down, unless ``OMP_NUM_THREADS`` is set here.
        num_gpus: GPUs that each worker reserves. The workers of a bundle see those of the bundle.
        resources: Further resources that each worker reserves, as ``{"special": 1}``.
        labels: Labels that the nodes must have, as ``{"accelerator-type": "H100"}``.
        workers_per_bundle: Workers that start together on one node, from one agent.
        strategy: How Ray spreads the bundles: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` (one
            node) or ``"STRICT_SPREAD"`` (a separate node for each bundle).
        timeout: Seconds within which Ray must have the resources, and within which each agent
            must then answer; also for a node that takes the place of a lost one.
        python: The interpreter on the nodes; by default the path of this one.

    Raises:
        ConfigurationError: A value is invalid, or Ray is not installed here.
    """

    replaces_hosts = True
    shares_machines = True

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        workers_per_bundle: int = 1,
        strategy: str = "PACK",
        timeout: float = TIMEOUT_S,
        python: str = sys.executable,
    ) -> None:
        self._each: Amounts = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        for name, amount in self._each.items():
            if not 0 <= amount < math.inf:
                raise ConfigurationError(f"{name} of a worker is {amount}; it must be 0 or more")
        if not any(self._each.values()):
            raise ConfigurationError(
                "workers that reserve nothing cannot be placed; give num_cpus, num_gpus or "
                "resources"
            )
        if workers_per_bundle < 1:
            raise ConfigurationError(
                f"workers_per_bundle is {workers_per_bundle}; it must be at least 1"
            )
        if strategy not in STRATEGIES:
            raise ConfigurationError(
                f"the strategy is {strategy!r}; Ray has {', '.join(STRATEGIES)}"
            )
        if not 0 < timeout < math.inf:
            raise ConfigurationError(f"timeout is {timeout}; it must be more than 0 seconds")
        package()
        self._address = address
        self._labels = dict(labels or {})
        self._workers_per_bundle = workers_per_bundle
        self._strategy = strategy
        self._timeout_s = timeout
        self.python = python
        self._reservation: Bundles | None = None

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the options of ``--on ray``."""
        add = parser.add_argument
        add("--ray-address", metavar="ADDRESS", help="the cluster, as ray.init() takes it")
        add("--num-cpus", type=float, default=1, metavar="N", help="CPUs of a worker (default: 1)")
        add("--num-gpus", type=float, default=0, metavar="N", help="GPUs of a worker (default: 0)")
        add("--resources", default="", metavar="LIST", help="further ones, as special=1,other=2")
        add("--labels", default="", metavar="LIST", help="labels of the nodes, as zone=a,kind=b")
        add(
            "--workers-per-bundle",
            type=int,
            default=1,
            metavar="N",
            help="workers that start together on a node (default: 1)",
        )
        add("--strategy", default="PACK", help=f"{', '.join(STRATEGIES)} (default: %(default)s)")
        add(
            "--ray-timeout",
            type=float,
            default=TIMEOUT_S,
            metavar="S",
            help="seconds within which Ray must have the resources (default: %(default)g)",
        )
        add("--python", default=sys.executable, metavar="PATH", help="the interpreter there")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Ray:
        """Returns the launcher that the command line describes."""
        given = _pairs(options.resources)
        try:
            resources = {name: float(number) for name, number in given}
        except ValueError:
            raise ConfigurationError(
                f"--resources is {options.resources!r}; write it like special=1,other=2"
            ) from None
        return cls(
            options.ray_address,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=resources,
            labels=dict(_pairs(options.labels)),
            workers_per_bundle=options.workers_per_bundle,
            strategy=options.strategy,
            timeout=options.ray_timeout,
            python=options.python,
        )

    def run(self, order: Order) -> int:
        """Runs a script in workers of a placement group; returns the exit status as shells do.

        Raises:
            LaunchError: No cluster can be reached, or it does not have the resources.
        """
        # Ray writes messages about its nodes to standard output, which is for the workers.
        with contextlib.redirect_stdout(sys.stderr):
            status = super().run(order)
        return output_closed() if status == BROKEN_PIPE_STATUS else status

    def hosts(self, workers: int) -> Sequence[Host]:
        """Waits for the placement group, and returns its bundles.

        Raises:
            LaunchError: No cluster can be reached, its version of Ray is another one, or it does
                not have the resources.
        """
        whole, rest = divmod(workers, self._workers_per_bundle)
        shares = [self._workers_per_bundle] * whole + [rest] * bool(rest)
        bundles = [
            {name: amount * share for name, amount in self._each.items() if amount}
            for share in shares
        ]
        reserved = self._reservation = Bundles(bundles, self._strategy, self._labels)
        reserved.make(self._address, self._timeout_s)
        addresses = reserved.addresses()
        return [
            Host(
                f"bundle {index}",
                address,
                share,
                timeout_s=self._timeout_s,
                connect=self._connector(reserved, index),
            )
            for index, (address, share) in enumerate(zip(addresses, shares, strict=True))
        ]

    def _connector(self, reserved: Bundles, index: int) -> Callable[[], ActorLink]:
        command = [self.python, "-m", "torchweft.launch.host_agent"]
        environment = {"OMP_NUM_THREADS": str(max(1, int(self._each["CPU"])))}
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return lambda: ActorLink(reserved, index, command, environment)

    def release(self) -> None:
        """Gives the placement group back, and ends the connection with Ray if this made it."""
        reserved, self._reservation = self._reservation, None
        if reserved is not None:
            reserved.release()

    def cluster(self, terms: Terms) -> Cluster:
        """Returns a cluster of workers in a placement group of its own, around this process."""
        return HostsLauncher.cluster(copy.copy(self), terms)


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = [each.partition("=") for each in text.split(",") if each]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ConfigurationError(f"{text!r} has {name + equals!r}; write it like a=1,b=2")
    return [(name.strip(), value.strip()) for name, _, value in pairs]
