"""Gathers the facts of one worker, and of its connections to others."""

from __future__ import annotations

import os
import platform
import resource
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from torchweft.agent.current import current
from torchweft.hybrid import Facts as Devices
from torchweft.hybrid import gather_facts
from torchweft.observe.doctor.links import UNKNOWN, NetworkLink, link_towards
from torchweft.protocol.membership.registration import HOST, NETWORK
from torchweft.rpc import get_worker_info, rpc_sync
from torchweft.version import VERSION

_LARGE_BYTES = 32 << 20
_CALLS = 200


@dataclass(frozen=True)
class HostFacts:
    """What a worker finds on its host.

    Attributes:
        worker: Its name.
        host: Name of its host.
        python: Version of Python.
        torch: Version of PyTorch.
        weft: Version of Weft.
        shm_bytes: Size of ``/dev/shm``; 0 if there is none.
        ptrace_scope: Whom the kernel permits to read memory (Yama); -1 if it has no such limit.
        descriptors: How many files and sockets the process may have open.
        mtu: The largest packet of each interface that is up, without loopback.
        addresses: To which its own host name resolves.
        time_s: Seconds since 1970, when the answer was made.
        devices: Devices, networks and back ends.
    """

    worker: str
    host: str
    python: str
    torch: str
    weft: str
    shm_bytes: int
    ptrace_scope: int
    descriptors: int
    mtu: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]
    time_s: float
    devices: Devices


@dataclass(frozen=True)
class PairFacts:
    """What one worker measures towards another.

    Attributes:
        caller: Name of the caller.
        callee: Name of the other.
        error: Why the other cannot be called; empty if it can.
        latency_s: Median time of a small call.
        bytes_per_s: Rate of a tensor of 32 MiB, sent.
        memory_bytes_per_s: Rate at which this host copies such a tensor in memory, the limit.
        obstacles: Why each channel is not used for sending; empty where it is.
        is_one_host: Whether both are on one host.
        clock_s: By how much the clock of the other is ahead.
        is_one_network: Whether both are in one network namespace, so that no network is between.
        link: The interface of this host on the way to the other, if there is a network between.
    """

    caller: str
    callee: str
    error: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    obstacles: tuple[tuple[str, str], ...] = ()
    is_one_host: bool = True
    clock_s: float = 0.0
    is_one_network: bool = True
    link: NetworkLink = UNKNOWN


def gather(sys: str = "/sys", shm: str = "/dev/shm") -> HostFacts:
    """Returns the facts of this worker."""
    return HostFacts(
        get_worker_info().name,
        socket.gethostname(),
        platform.python_version(),
        torch.__version__,
        VERSION,
        _size_of(shm),
        _number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _interfaces(Path(sys)),
        _own_addresses(),
        time.time(),
        gather_facts(sys=Path(sys)),
    )


def measure(callee: str) -> PairFacts:
    """Returns what this worker measures towards another. Blocks; takes about 0.2 s."""
    caller = get_worker_info().name
    try:
        rpc_sync(callee, time.time)
        times, clocks = [], []
        for _ in range(_CALLS):
            start_s, start = time.perf_counter(), time.time()
            theirs = rpc_sync(callee, time.time)
            times.append(time.perf_counter() - start_s)
            clocks.append(theirs - (start + time.time()) / 2)
        tensor = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device="cpu")
        rpc_sync(callee, torch.numel, (tensor,))
        sent = min(_timed(lambda: rpc_sync(callee, torch.numel, (tensor,))) for _ in range(3))
        other = tensor.clone()
        copied = min(_timed(lambda: other.copy_(tensor)) for _ in range(3))
    except Exception as error:
        return PairFacts(caller, callee, f"{type(error).__name__}: {error}")
    peer = current().members.find(callee)
    obstacles = tuple((kind.name.lower(), why) for kind, why in peer.channels.obstacles().items())
    both = [each.registration for each in (current().me, peer)]
    hosts, networks = ({each.facts.get(fact) for each in both} for fact in (HOST, NETWORK))
    is_one_network = len(hosts) == len(networks) == 1
    return PairFacts(
        caller,
        callee,
        "",
        statistics.median(times),
        _LARGE_BYTES / sent,
        _LARGE_BYTES / copied,
        obstacles,
        len(hosts) == 1,
        statistics.median(clocks),
        is_one_network,
        UNKNOWN if is_one_network else link_towards(peer.registration.addresses),
    )


def _timed(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


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
