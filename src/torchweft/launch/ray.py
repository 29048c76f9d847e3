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
import importlib
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.hosts import Host
from torchweft.launch.hosts_launcher import HostsLauncher
from torchweft.launch.run import BROKEN_PIPE_STATUS, Order, output_closed

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms

Amounts = dict[str, float]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
TIMEOUT_S = 60.0
_REACH_S = 10.0
_LOOK_S = 0.2
_AGAIN_S = 1.0
_NODES_LISTED = 8
_REASON_S = 1.0
"""Seconds in which Ray ends an actor after it has killed the actor's children."""


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
        text = "workers that start together on a node (default: 1)"
        add("--workers-per-bundle", type=int, default=1, metavar="N", help=text)
        add("--strategy", default="PACK", help=f"{', '.join(STRATEGIES)} (default: %(default)s)")
        text = "seconds within which Ray must have the resources (default: %(default)g)"
        add("--ray-timeout", type=float, default=TIMEOUT_S, metavar="S", help=text)
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
        command = [self.python, "-m", "torchweft.launch.host_agent"]
        environment = {"OMP_NUM_THREADS": str(max(1, int(self._each["CPU"])))}
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        hosts = []
        for index, (address, share) in enumerate(zip(reserved.addresses(), shares, strict=True)):
            connect = partial(ActorLink, reserved, index, command, environment)
            name = f"bundle {index}"
            hosts.append(Host(name, address, share, timeout_s=self._timeout_s, connect=connect))
        return hosts

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


def package() -> Any:
    """Returns the package, which is imported only here."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            f"workers on Ray need the package 'ray' ({error}); install it: "
            "pip install 'torchweft[ray]', in the version of the cluster"
        ) from error


class Bundles:
    """The connection with a cluster, and a placement group in it.

    Args:
        bundles: The resources of each bundle.
        strategy: How they are spread.
        labels: Labels of their nodes.
    """

    def __init__(
        self, bundles: Sequence[Amounts], strategy: str, labels: Mapping[str, str]
    ) -> None:
        self._bundles = list(bundles)
        self._strategy = strategy
        self._labels = dict(labels)
        self._limit_s = 0.0
        self._group: Any = None
        self._has_connected = False

    def make(self, address: str | None, limit_s: float) -> None:
        """Connects, and blocks until all bundles are placed."""
        ray, self._limit_s = package(), limit_s
        if not ray.is_initialized():
            _connect(ray, address)
            self._has_connected = True
        wanted: dict[str, Any] = {"strategy": self._strategy, "name": "torchweft"}
        if self._labels:
            wanted["bundle_label_selector"] = [self._labels] * len(self._bundles)
        try:
            self._group = ray.util.placement_group(self._bundles, **wanted)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Ray {ray.__version__} refuses the placement group: {error}"
            ) from error
        until_s = time.monotonic() + limit_s
        while not self._group.wait(1):  # whole seconds, in which Ctrl-C is not heard
            if time.monotonic() >= until_s:
                raise LaunchError(self.shortage())

    def addresses(self) -> list[str]:
        """Returns the address of each bundle's node."""
        ray = package()
        table = ray.util.placement_group_table(self._group)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = table["bundles_to_node_id"]
        return [nodes[places[index]] for index in range(len(self._bundles))]

    def shortage(self) -> str:
        """Says what is missing, and what the cluster has."""
        ray = package()
        if self._group.wait(1):
            return f"Ray has placed it, but not started its actor within {self._limit_s:g} s"
        has, free = ray.cluster_resources(), ray.available_resources()
        names = dict.fromkeys(name for bundle in self._bundles for name in bundle)
        wanted = {name: sum(bundle.get(name, 0) for bundle in self._bundles) for name in names}
        lines = [
            f"{name}: {amount:g} wanted, the cluster has {has.get(name, 0):g}, "
            f"{free.get(name, 0):g} free"
            for name, amount in wanted.items()
        ]
        nodes = [_of_node(node) for node in ray.nodes() if node["Alive"]]
        more = ["..."] if len(nodes) > _NODES_LISTED else []
        labels = f" on nodes with the labels {self._labels}" if self._labels else ""
        return (
            f"Ray has found no place for {len(self._bundles)} bundles of up to "
            f"{_shown(self._bundles[0])} each ({self._strategy}){labels} within "
            f"{self._limit_s:g} s. {'; '.join(lines)}. Nodes: "
            f"{'; '.join([*nodes[:_NODES_LISTED], *more])}. Reserve less, add nodes, or wait "
            "longer (timeout, --ray-timeout)"
        )

    def actor(self, index: int) -> Any:
        """Asks for an actor in a bundle; does not wait for it."""
        ray = package()
        amounts = dict(self._bundles[index])
        return (
            ray.remote(concurrency_groups={"out": 1, "err": 1})(_agent_class(ray))
            .options(
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                max_restarts=0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            .remote()
        )

    def release(self) -> None:
        """Removes the placement group, with its actors; disconnects if this has connected."""
        ray = package()
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            ray.util.remove_placement_group(group)
        if self._has_connected:
            self._has_connected = False
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Connects with a cluster, or starts one where ``ray.init`` would."""
    place = address or os.environ.get("RAY_ADDRESS") or ""
    host, _, port = place.rpartition(":")
    if port.isdigit() and "//" not in place:  # Ray itself tries for a minute
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as error:
            raise LaunchError(
                f"no Ray answers at {place} ({error}); is it running? 'ray status --address "
                f"{place}' tells. Correct --ray-address or RAY_ADDRESS"
            ) from error
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # ConnectionError, RuntimeError for another version, and others
        said = " ".join(str(error).split())
        raise LaunchError(
            f"the cluster of Ray at {place or 'this machine'} cannot be used from here, with Ray "
            f"{ray.__version__}: {said}"
        ) from error


def _of_node(node: Mapping[str, Any]) -> str:
    own = {
        name: amount
        for name, amount in node["Resources"].items()
        if "memory" not in name and not name.startswith("node:") and "_group_" not in name
    }
    return f"{node['NodeManagerAddress']} with {_shown(own) or 'nothing'}"


def _shown(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items()))


# The link with one agent


def _agent_class(ray: Any) -> type:
    """Returns the class of the actors; Ray sends it by value, so its processes need no Weft."""

    class WeftAgent:
        def start(self, command: list[str], environment: dict[str, str]) -> str:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
            return str(ray.util.get_node_ip_address())

        def write(self, data: bytes) -> None:
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) :]  # type: ignore[union-attr]

        def finish(self) -> None:
            self._process.stdin.close()  # type: ignore[union-attr]

        @ray.method(concurrency_group="out")  # type: ignore[untyped-decorator]
        def read(self) -> bytes:
            return os.read(self._process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]

        @ray.method(concurrency_group="err")  # type: ignore[untyped-decorator]
        def read_error(self) -> bytes:
            return bytes(self._process.stderr.readline())  # type: ignore[union-attr]

        def exit_code(self, reason_s: float) -> int:
            code = self._process.wait()
            if code < 0:  # Perhaps Ray has killed it, and ends this process next.
                time.sleep(reason_s)
            return code

    return WeftAgent


class ActorLink:
    """The standard input, output and error of an agent, through calls of an actor.

    It is a ``torchweft.launch.hosts.Link``. The thread that receives makes the actor, and makes
    it again if its node is lost before the agent has started.

    Args:
        reserved: The bundles.
        index: The number of the bundle.
        command: The command of the agent.
        environment: Variables of the agent, added to those of Ray's process.
    """

    def __init__(
        self, reserved: Bundles, index: int, command: list[str], environment: dict[str, str]
    ) -> None:
        self._reserved = reserved
        self._index = index
        self._command = command
        self._environment = environment
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        self._actor: Any = None
        self._has_started = self._is_killed = False
        self._settled = threading.Event()
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._failure = ""
        self.address = ""

    def send(self, data: bytes) -> None:
        """Writes to the agent, at the latest when it has started; does not wait."""
        with self._lock:
            if self._has_started:
                self._write(data)
            else:
                self._unsent.append(data)

    def receive(self) -> bytes:
        """Blocks until the agent has written; returns nothing at the end."""
        data = b""
        if self._has_started or self._start():
            data = self._get(self._actor.read)
        if not data:
            self._settled.set()
            self._ended.set()
        return data

    def said(self) -> Iterator[bytes]:
        """Blocks for each next line of the agent's standard error."""
        self._settled.wait()
        while self._has_started and (line := self._get(self._actor.read_error)):
            yield line

    def why_silent(self) -> str:
        """Returns why the agent has not started; empty if it has."""
        return "" if self._has_started else f"is not there: {self._reserved.shortage()}"

    def why_ended(self) -> str:
        """Returns what Ray said about the end, or the exit code of an agent that Ray did not end.

        When Ray ends a process, it kills the children first. So the agent's output may end before
        the actor does, and only another call of the actor tells why.
        """
        if self._failure or not self._has_started:
            return self._failure
        try:
            _check_connected()
            ending = self._actor.exit_code.remote(_REASON_S)
            is_known = package().wait([ending], timeout=2 * _REASON_S)[0]
            code = package().get(ending) if is_known else 0
        except Exception as error:  # of many types, as in _get
            return _said(error)
        return f"its command ended with exit code {code}" if code else ""

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""
        with self._lock:
            if self._has_started and not self._ending.is_set() and package().is_initialized():
                _forget(self._actor.finish.remote())
            self._ending.set()

    def end(self, *, is_open: bool, limit_s: float) -> None:
        """Waits for the end of the agent, for at most ``limit_s``, and ends the actor."""
        self._ending.set()
        if is_open:
            self._ended.wait(limit_s)
        if self._actor is not None and not self._is_killed and package().is_initialized():
            self._is_killed = True
            package().kill(self._actor)

    def close(self) -> None:
        """Does nothing: Ray releases an actor that is gone."""

    def _write(self, data: bytes) -> None:
        _check_connected()
        _forget(self._actor.write.remote(data))

    def _get(self, method: Any) -> bytes:
        try:
            _check_connected()
            return bytes(package().get(method.remote()))
        except Exception as error:  # of many types: the actor, its node or Ray itself is lost
            self._failure = _said(error)
            return b""

    def _start(self) -> bool:
        """Starts the agent; returns False if it cannot be started, or is not wanted any more."""
        ray = package()
        while not self._ending.is_set():
            self._actor = self._reserved.actor(self._index)
            started = self._actor.start.remote(self._command, self._environment)
            try:
                while not ray.wait([started], timeout=_LOOK_S)[0]:
                    if self._ending.is_set():
                        return False
                self.address = ray.get(started)
            except ray.exceptions.RayActorError:  # its node is lost, as Ray learns just now
                self._ending.wait(_AGAIN_S)
            except Exception as error:
                self._failure = _said(error)
                return False
            else:
                with self._lock:
                    self._has_started = True
                    for data in self._unsent:
                        self._write(data)
                self._settled.set()
                return True
        return False


def _check_connected() -> None:
    """Raises ConnectionError without a connection, which Ray's functions would then make."""
    if not package().is_initialized():
        raise ConnectionError("ray.shutdown() has ended the connection")


def _forget(reference: Any) -> None:
    """Takes the error of a call that nothing waits for: the end of the actor, seen elsewhere."""
    reference.future().add_done_callback(lambda done: done.exception())


def _said(error: Exception) -> str:
    """Returns the sentence in which Ray names the cause, after a list of ids."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip() and line[0] not in "\t "]
    return f"Ray: {lines[-1].partition('. ')[0].rstrip('.') if lines else type(cause).__name__}"
