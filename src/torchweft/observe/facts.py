"""What a worker tells of its host, and of its ways to other workers; ``torchweft doctor`` asks it.

The answers travel as JSON to observers, and to a worker that examines its group.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torchweft.errors import ProtocolError
from torchweft.observe.report import read

FACTS, MEASURE = "facts", "measure "
"""The questions of an observer; the name of another worker follows the second one."""


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
        addresses: To which its own host name resolves, if that was asked.
        time_s: Seconds since 1970, when the answer was made.
        device: The device that it trains on: ``"cpu"`` or ``"cuda:0"``.
        backends: The back ends of collectives that its PyTorch has.
        has_infiniband: Whether a port of InfiniBand is active.
        has_ip_over_infiniband: Whether a network interface runs over InfiniBand.
        is_resolved: Whether its own host name was asked for.
        plain_because: Why its calls go by the twin in Python; empty where they go by the one in C.
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
    device: str = "cpu"
    backends: tuple[str, ...] = ("gloo",)
    has_infiniband: bool = False
    has_ip_over_infiniband: bool = False
    is_resolved: bool = True
    plain_because: str = ""


@dataclass(frozen=True)
class PairFacts:
    """What one worker knows of its way to another, and what it has measured.

    Attributes:
        caller: Name of the caller.
        callee: Name of the other.
        error: Why the other cannot be called; empty if it can.
        latency_s: Median time of a small call; 0 if it was not measured.
        bytes_per_s: Rate of a large tensor, sent.
        memory_bytes_per_s: Rate at which this host copies such a tensor in memory, the limit.
        obstacles: Why each channel is not used for sending; empty where it is.
        is_one_host: Whether both are on one host.
        clock_s: By how much the clock of the other is ahead.
        clock_error_s: By how much ``clock_s`` may be wrong.
        is_one_network: Whether both are in one network namespace, so that no network is between.
        interface: The interface of this host on the way to the other, if a network is between.
        interface_bytes_per_s: Its speed; 0 if it does not tell.
        inline_bytes: The largest tensor that travels within its message.
        channels: The channels by which this worker sends larger tensors, best first, each with
            the size of its smallest tensor.
        is_busy: Whether the other worker did not run the calls in time, so that ``error`` tells
            of its work and not of the way to it.
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
    clock_error_s: float = 0.0
    is_one_network: bool = True
    interface: str = ""
    interface_bytes_per_s: float = 0.0
    inline_bytes: int = 0
    channels: tuple[tuple[str, int], ...] = ()
    is_busy: bool = False

    @property
    def where(self) -> str:
        """The pair, for people."""
        return f"{self.caller} -> {self.callee}"


@dataclass(frozen=True)
class WorkerFacts:
    """The facts of one worker.

    Attributes:
        host: What it finds on its host.
        pairs: Its ways to the workers to which it has a connection, not measured.
    """

    host: HostFacts
    pairs: tuple[PairFacts, ...]


def encode_facts(answer: HostFacts | WorkerFacts | PairFacts) -> str:
    """Returns facts as JSON; ``decode_host``, ``decode_facts`` and ``decode_pair`` read them."""
    return json.dumps(asdict(answer))


def decode_host(data: str | bytes) -> HostFacts:
    """Reads what a member tells of its host; raises ProtocolError if it is malformed."""
    return read(HostFacts, _loaded(data))


def decode_facts(data: str | bytes) -> WorkerFacts:
    """Reads the answer to ``FACTS``; raises ProtocolError if it is malformed."""
    return read(WorkerFacts, _loaded(data))


def decode_pair(data: str | bytes) -> PairFacts:
    """Reads the answer to ``MEASURE``; raises ProtocolError if it is malformed."""
    return read(PairFacts, _loaded(data))


def _loaded(data: str | bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the facts of a worker are no JSON: {error}") from error
