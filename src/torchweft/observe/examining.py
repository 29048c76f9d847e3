"""Tells the facts of a worker and its host, and measures its ways to others; see ``doctor``.

Observers ask for facts, and members call ``tell_host`` and ``tell_pair``, of workers that are not
strict: they read files of the host. A measurement makes a bounded number of calls to the other
worker, of two functions that a strict worker runs as well.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from torchweft.engine.codec.registry import remotely_callable, remotely_callable_unless_strict
from torchweft.engine.io import addresses
from torchweft.engine.protocol.observing import Reading, lead_of
from torchweft.engine.protocol.registration import HOST, NETWORK
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallTimeout, ProtocolError
from torchweft.native import native, reason
from torchweft.observe.report import HostFacts, PairFacts, WorkerFacts, encode
from torchweft.rpc.api import rpc_sync
from torchweft.rpc.observed import WorkerState, find_devices, health_of
from torchweft.rpc.serving import check_types
from torchweft.version import VERSION

T = TypeVar("T")

_LEAST_S = 1e-3


class Effort(NamedTuple):
    """How much a measurement of a pair does.

    Attributes:
        calls: The number of small calls.
        tensors: The number of large tensors, after a first one.
        size_bytes: Their size.
        timeout_s: How long it may take.
    """

    calls: int
    tensors: int
    size_bytes: int
    timeout_s: float


class _Deadline:
    """Limits all calls of one measurement together."""

    def __init__(self, effort: Effort) -> None:
        self._end_s = time.monotonic() + effort.timeout_s

    def call(self, callee: str, function: Callable[..., T], *args: object) -> T:
        left_s = max(self._end_s - time.monotonic(), _LEAST_S)
        return rpc_sync(callee, function, args=args, timeout=left_s)


THOROUGH = Effort(200, 3, 32 << 20, 30.0)
"""That of a worker which examines its group: about 0.2 s."""
BRIEF = Effort(20, 2, 4 << 20, 1.0)
"""That of an observer, which must not disturb the group: some milliseconds."""


def gather(sys: str = "/sys", shm: str = "/dev/shm", *, is_resolved: bool = True) -> HostFacts:
    """Returns the facts of this worker.

    Args:
        sys: Where the kernel shows its devices.
        shm: Where it has shared memory.
        is_resolved: Whether to resolve the own host name, which may take seconds.
    """
    devices = find_devices(sys=Path(sys))
    return HostFacts(
        current().info.name,
        socket.gethostname(),
        platform.python_version(),
        torch.__version__,
        VERSION,
        _size_of(shm),
        _number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _interfaces(Path(sys)),
        _own_addresses() if is_resolved else (),
        time.time(),
        devices.device,
        devices.backends,
        devices.has_infiniband,
        devices.has_ip_over_infiniband,
        is_resolved,
        "" if native is not None else reason,
    )


def facts_of(agent: Agent) -> WorkerFacts:
    """Returns all that this worker knows without measuring. Sends nothing."""
    peers = [each for each in agent.members.present() if not each.is_self and each.link is not None]
    host = gather(is_resolved=False)
    return WorkerFacts(host, tuple(_known(agent, peer) for peer in peers))


def _known(agent: Agent, peer: Peer) -> PairFacts:
    found = health_of(agent, peer)
    if found.state in (WorkerState.SILENT, WorkerState.RECONNECTING):
        text = f"its connection is {found.state.value}, for {found.silence_s:.0f} s"
        return PairFacts(agent.info.name, peer.name, text)
    both = [each.registration for each in (agent.me, peer)]
    hosts, networks = ({each.facts.get(fact) for each in both} for fact in (HOST, NETWORK))
    is_one_network = len(hosts) == len(networks) == 1
    link = UNKNOWN if is_one_network else link_towards(peer.registration.addresses)
    return PairFacts(
        agent.info.name,
        peer.name,
        obstacles=tuple((name, why) for name, why in peer.ways.obstacles().items()),
        is_one_host=len(hosts) == 1,
        is_one_network=is_one_network,
        interface=link.interface,
        interface_bytes_per_s=link.bytes_per_s,
        inline_bytes=peer.ways.inline_limit_bytes,
        channels=tuple(peer.ways.sizes()),
    )


def measure(callee: str, effort: Effort) -> PairFacts:
    """Returns what this worker measures towards another. Blocks, for a limited time."""
    agent = current()
    name = agent.info.name
    deadline = _Deadline(effort)
    try:
        peer = agent.members.find(callee)
        latency_s, readings = _small_calls(deadline, callee, effort)
        bytes_per_s, memory_bytes_per_s = _large_tensors(deadline, callee, effort)
    except CallTimeout as error:
        # Its host answers, so all its slots run functions, or code in C keeps its interpreter.
        is_busy = health_of(agent, peer).state is WorkerState.CONNECTED
        text = (
            f"no call ended within {effort.timeout_s:g} s" if is_busy else f"CallTimeout: {error}"
        )
        return PairFacts(name, callee, text, is_busy=is_busy)
    except Exception as error:
        return PairFacts(name, callee, f"{type(error).__name__}: {error}")
    clock = lead_of(readings)
    return replace(
        _known(agent, peer),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        clock_s=clock.ahead_s,
        clock_error_s=clock.error_s,
    )


def _small_calls(deadline: _Deadline, callee: str, effort: Effort) -> tuple[float, list[Reading]]:
    """Returns the median time of a call, and readings of the other clock."""
    deadline.call(callee, read_time)
    times, readings = [], []
    for _ in range(effort.calls):
        start_s, start = time.perf_counter(), time.time()
        theirs = deadline.call(callee, read_time)
        times.append(time.perf_counter() - start_s)
        readings.append(Reading(start, theirs, start + times[-1]))
    return sorted(times)[len(times) // 2], readings


def _large_tensors(deadline: _Deadline, callee: str, effort: Effort) -> tuple[float, float]:
    """Returns the rates at which a tensor is sent, and copied in the memory of this host."""
    tensor = torch.zeros(effort.size_bytes, dtype=torch.uint8, device="cpu")

    def send() -> None:
        deadline.call(callee, weigh, tensor)

    send()
    sent_s = min(_timed(send) for _ in range(effort.tensors))
    other = tensor.clone()
    copied_s = min(_timed(lambda: other.copy_(tensor)) for _ in range(effort.tensors))
    return effort.size_bytes / sent_s, effort.size_bytes / copied_s


def _timed(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


# What members call


@remotely_callable_unless_strict
def tell_host() -> bytes:
    """Returns the facts of this worker, as JSON; reads files of its host."""
    return encode(gather())


@remotely_callable_unless_strict
def tell_pair(callee: str, timeout: float) -> bytes:
    """Measures towards another worker thoroughly; returns the facts as JSON."""
    check_types(callee=(callee, str), timeout=(timeout, (int, float)))
    return encode(measure(callee, THOROUGH._replace(timeout_s=timeout)))


@remotely_callable
def read_time() -> float:
    """Returns the time of day, in seconds since 1970."""
    return time.time()


@remotely_callable
def weigh(tensor: torch.Tensor) -> int:
    """Returns how many bytes a tensor has that has arrived."""
    check_types(tensor=(tensor, torch.Tensor))
    return int(tensor.nbytes)


def measured_for_observer(agent: Agent, callee: str) -> PairFacts:
    """Measures briefly towards a worker to which there is a connection already.

    Raises:
        ProtocolError: There is none, and an observer makes none.
    """
    found = [each for each in agent.members.present() if each.name == callee and not each.is_self]
    if not found or found[0].link is None:
        raise ProtocolError(f"an observer measures no way to {callee!r}: there is no connection")
    return measure(callee, BRIEF)


# The host


def _size_of(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _interfaces(sys: Path) -> tuple[tuple[str, int], ...]:
    found = []
    for path in sorted(sys.glob("class/net/*/mtu")):
        name = path.parent.name
        try:
            is_up = (path.parent / "operstate").read_text().strip() == "up"
        except OSError:
            continue
        if is_up and name != "lo":
            found.append((name, _number_in(path)))
    return tuple(found)


def _own_addresses() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


# The network on the way to another host


_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_ADDRESS_AT = slice(20, 24)
_MEGABIT = 125_000
"""Bytes per second."""


class NetworkLink(NamedTuple):
    """A network interface.

    Attributes:
        interface: Its name; empty if it is unknown.
        bytes_per_s: Its speed; 0 if it does not tell, as most virtual ones.
    """

    interface: str = ""
    bytes_per_s: float = 0.0


UNKNOWN = NetworkLink()


def link_towards(texts: Iterable[str], sys: Path = Path("/sys")) -> NetworkLink:
    """Returns the interface on the route to the first of a worker's addresses in a network."""
    for place in map(addresses.parse, texts):
        if isinstance(place, addresses.TcpAddress) and addresses.is_far(place):
            interface = _interface_of(addresses.own_address_towards(place.host))
            return NetworkLink(interface, _speed(sys, interface)) if interface else UNKNOWN
    return UNKNOWN


def _interface_of(address: str) -> str:
    """Returns the name of the interface that has an address of this host; empty for IPv6."""
    try:
        own = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if own.version == 6:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode()[: _NAME_BYTES - 1])
            try:
                found = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # It has no address.
                continue
            if found[_ADDRESS_AT] == own.packed:
                return name
    return ""


def _speed(sys: Path, interface: str) -> float:
    try:
        megabits = int((sys / "class/net" / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return max(megabits, 0) * _MEGABIT
