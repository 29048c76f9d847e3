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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from torchweft.errors import CallTimeout, NotAllowed, ProtocolError
from torchweft.extending import (
    check_types,
    find_devices,
    remotely_callable,
    route_to,
    serves_another_strictly,
    this_worker,
)
from torchweft.native import native, reason
from torchweft.reports import (
    FACTS,
    MEASURE,
    HostFacts,
    PairFacts,
    Route,
    WorkerFacts,
    encode,
    lead_of,
)
from torchweft.rpc import WorkerHealth, WorkerState, health, rpc_sync
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
        this_worker().name,
        socket.gethostname(),
        platform.python_version(),
        torch.__version__,
        VERSION,
        _size_of(shm),
        _number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _interfaces(Path(sys)),
        _own_addresses() if is_resolved else (),
        devices.device,
        devices.backends,
        devices.has_infiniband,
        devices.has_ip_over_infiniband,
        is_resolved,
        "" if native is not None else reason,
    )


def facts() -> WorkerFacts:
    """Returns all that this worker knows without measuring. Sends nothing."""
    return WorkerFacts(gather(is_resolved=False), tuple(_known(each) for each in _connected()))


def _connected() -> list[WorkerHealth]:
    """Returns the health of the workers to which there is a connection."""
    without = (WorkerState.SELF, WorkerState.UNUSED, WorkerState.LOST)
    return [each for each in health() if each.state not in without]


def _known(found: WorkerHealth) -> PairFacts:
    caller, callee = this_worker().name, found.worker.name
    if found.state is not WorkerState.CONNECTED:
        text = f"its connection is {found.state.value}, for {found.silence_s:.0f} s"
        return PairFacts(caller, callee, text)
    return _with_route(PairFacts(caller, callee), route_to(found.worker))


def _with_route(pair: PairFacts, route: Route) -> PairFacts:
    interface = interface_of(route.own_address)
    return replace(
        pair,
        is_one_host=route.is_one_host,
        is_one_network=route.is_one_network,
        interface=interface,
        interface_bytes_per_s=speed_of(interface) if interface else 0.0,
        inline_bytes=route.inline_bytes,
        channels=route.channels,
        obstacles=route.obstacles,
    )


def measure(callee: str, effort: Effort) -> PairFacts:
    """Returns what this worker measures towards another. Blocks, for a limited time."""
    pair = PairFacts(this_worker().name, callee)
    deadline = _Deadline(effort)
    try:
        latency_s, readings = _small_calls(deadline, callee, effort)
        bytes_per_s, memory_bytes_per_s = _large_tensors(deadline, callee, effort)
    except CallTimeout as error:
        # Its host answers, so all its slots run functions, or code in C keeps its interpreter.
        states = {each.worker.name: each.state for each in health()}
        if states.get(callee) is not WorkerState.CONNECTED:
            return replace(pair, error=f"CallTimeout: {error}")
        text = f"no call ended within {effort.timeout_s:g} s"
        return replace(pair, error=text, is_busy=True)
    except Exception as error:
        return replace(pair, error=f"{type(error).__name__}: {error}")
    clock = lead_of(readings)
    measured = replace(
        pair,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        clock_s=clock.ahead_s,
        clock_error_s=clock.error_s,
    )
    return _with_route(measured, route_to(callee))


def _small_calls(
    deadline: _Deadline, callee: str, effort: Effort
) -> tuple[float, list[tuple[float, float, float]]]:
    """Returns the median time of a call, and readings of the other clock."""
    deadline.call(callee, read_time)
    times, readings = [], []
    for _ in range(effort.calls):
        start_s, start = time.perf_counter(), time.time()
        theirs = deadline.call(callee, read_time)
        times.append(time.perf_counter() - start_s)
        readings.append((start, theirs, start + times[-1]))
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


def _check_open() -> None:
    """Raises NotAllowed if another worker asks a strict one."""
    if serves_another_strictly():
        name, what = this_worker().name, "examine its host"
        raise NotAllowed(
            f"worker {name!r} is strict and does not {what} for others: that reads files",
            worker=name,
            refused=what,
        )


@remotely_callable
def tell_host() -> bytes:
    """Returns the facts of this worker, as JSON; reads files of its host."""
    _check_open()
    return encode(gather())


@remotely_callable
def tell_pair(callee: str, timeout: float) -> bytes:
    """Measures towards another worker thoroughly; returns the facts as JSON."""
    _check_open()
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


# What observers ask


def answer(question: str) -> bytes:
    """Returns the answer to a question of an observer that is about the host, or about a way.

    Raises:
        ProtocolError: There is no such question, or it is about a worker to which there is no
            connection: an observer makes none.
    """
    if question == FACTS:
        return encode(facts())
    if not question.startswith(MEASURE):
        raise ProtocolError(f"an observer asks {question!r}")
    callee = question.removeprefix(MEASURE)
    if callee not in [each.worker.name for each in _connected()]:
        raise ProtocolError(f"an observer measures no way to {callee!r}: there is no connection")
    return encode(measure(callee, BRIEF))


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


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an address of this host; empty for IPv6."""
    try:
        own = ipaddress.IPv4Address(address)
    except ValueError:
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


def speed_of(interface: str, sys: Path = Path("/sys")) -> float:
    """Returns the bytes per second of an interface; 0 if it does not tell, as most virtual ones."""
    megabits = _number_in(sys / "class/net" / interface / "speed")
    return max(megabits, 0) * _MEGABIT * 1.0
