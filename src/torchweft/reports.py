"""What workers tell observers, and how an observer asks one of them. Does not import torch.

A worker answers with who it is, and with a report of everything it does. A served call has a key
that its caller and its callee give it alike. Reports travel as JSON. They are read strictly, since
the sender may be of another version.

An observer asks over a connection of its own for each question. The greeting is that between
workers, with the key of observers; see ``docs/protocols/observing.md``.

The buckets of a histogram of times grow by a constant factor, 2^(1/8): 8 for each doubling. So one
histogram covers microseconds and hours, and a percentile is off by 4.4 % at most. A bucket is named
by its number, as text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import socket
import struct
import time
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

from torchweft.columns import LAYOUT, printable
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Greeting, Handshake, NotProven, check_user
from torchweft.engine.io.secure import TlsOptions, secure_client
from torchweft.engine.protocol.connecting import OBSERVER, Hello, Purpose
from torchweft.engine.protocol.observing import (
    CALL,
    GATHERING,
    MESSAGE,
    PASS,
    SHUTDOWN,
    VALUE,
    NumberRow,
    NumberTable,
    Wait,
    call_key,
    making_key,
    reference_key,
)
from torchweft.engine.wire.frames import HEADER
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ConfigurationError, ObserverRefused, ProtocolError
from torchweft.secret import Secret, key_of_observers

__all__ = [
    "CALL",
    "DETAIL",
    "FACTS",
    "FILE_SUFFIX",
    "GATHERING",
    "LEAST_S",
    "LENT",
    "MEASURE",
    "MESSAGE",
    "MESSAGES",
    "METRICS",
    "PASS",
    "REPORT",
    "SHUTDOWN",
    "STEPS",
    "VALUE",
    "WHO",
    "Devices",
    "Event",
    "FunctionCounts",
    "HeldReference",
    "HostFacts",
    "Identity",
    "Lead",
    "Member",
    "NumberRow",
    "NumberTable",
    "OpenCall",
    "PairFacts",
    "Report",
    "Route",
    "ServedCall",
    "Thread",
    "Times",
    "TlsOptions",
    "Traffic",
    "Wait",
    "WorkerFacts",
    "ask",
    "bucket_of",
    "call_key",
    "decode",
    "encode",
    "lead_of",
    "listeners_here",
    "making_key",
    "may_reach",
    "percentile",
    "process_at",
    "read",
    "reference_key",
    "since",
    "sum_of",
    "time_of",
]

STEPS = 8
"""Buckets for each doubling."""
LEAST_S = 1e-7
"""Shorter times count as this."""

Times = Mapping[str, int]


def bucket_of(time_s: float) -> int:
    """Returns the number of the bucket of a time."""
    return math.floor(math.log2(max(time_s, LEAST_S)) * STEPS)


def time_of(bucket: int) -> float:
    """Returns the time in the middle of a bucket, in seconds."""
    return float(2.0 ** ((bucket + 0.5) / STEPS))


def percentile(times: Times, share: float) -> float:
    """Returns the time that ``share`` of all calls did not exceed; NaN if there are none."""
    left = share * sum(times.values())
    for bucket, count in sorted((int(bucket), count) for bucket, count in times.items()):
        left -= count
        if count and left <= 0:
            return time_of(bucket)
    return math.nan


def since(now: Times, before: Times) -> dict[str, int]:
    """Returns the calls of ``now`` that are not in ``before``; all if ``before`` has others."""
    grown = {bucket: count - before.get(bucket, 0) for bucket, count in now.items()}
    is_later = all(count >= 0 for count in grown.values()) and before.keys() <= now.keys()
    return {bucket: count for bucket, count in (grown if is_later else dict(now)).items() if count}


def sum_of(*all_times: Times) -> dict[str, int]:
    """Returns the calls of all histograms together."""
    total: dict[str, int] = {}
    for times in all_times:
        for bucket, count in times.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


class Lead(NamedTuple):
    """By how much another worker's clock is ahead of the own one; all in seconds.

    Attributes:
        at_s: The own time at which it was measured.
        ahead_s: The lead.
        error_s: By how much ``ahead_s`` may be wrong.
    """

    at_s: float
    ahead_s: float
    error_s: float


def lead_of(readings: Iterable[tuple[float, float, float]]) -> Lead:
    """Returns the lead that the shortest of some calls shows.

    Args:
        readings: Of each call that read the other clock: the own time before it, the other time,
            and the own time after it.

    Raises:
        ValueError: There are no readings.
    """
    sent_s, read_s, received_s = min(readings, key=lambda each: each[2] - each[0])
    middle_s = (sent_s + received_s) / 2
    return Lead(middle_s, read_s - middle_s, (received_s - sent_s) / 2)


T = TypeVar("T")
_LARGEST = 1 << 64


def read(wanted: type[T], data: object) -> T:
    """Returns the object of a dataclass that ``dataclasses.asdict`` made ``data`` of.

    Args:
        wanted: The dataclass. Its fields are numbers, texts, tuples of one type (with ``...``) or
            of several, dictionaries with texts as keys, and further dataclasses. Unknown
            fields of ``data`` are ignored, and fields with a default may be missing. Characters
            of texts that control a terminal are escaped.
        data: The output of ``json.loads``.

    Raises:
        ProtocolError: A field is missing, has the wrong type, or is an impossible number.
    """
    made: T = _read(wanted, data, wanted.__name__)
    return made


def _read(wanted: Any, data: object, place: str) -> Any:
    if is_dataclass(wanted):
        return _read_object(wanted, data, place)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        return _read_tuple(typing.get_args(wanted), _checked(data, list, place), place)
    if origin is dict:
        kind = typing.get_args(wanted)[1]
        pairs = _checked(data, dict, place).items()
        return {
            printable(str(key), LAYOUT): _read(kind, value, f"{place}.{key}")
            for key, value in pairs
        }
    if wanted is float and type(data) is int:
        data = float(_limited(data, place))
    value = _checked(data, wanted, place)
    if wanted is str:
        return printable(value, LAYOUT)
    return _limited(value, place) if wanted in (int, float) else value


def _limited(value: int | float, place: str) -> int | float:
    """Returns a number with which one can calculate, and that a clock can show."""
    if not -_LARGEST < value < _LARGEST:  # Nor is it a NaN.
        raise ProtocolError(f"{place} of a report is a number beyond any that a worker has")
    return value


def _read_tuple(kinds: tuple[Any, ...], found: list[object], place: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(found)
    if len(kinds) != len(found):
        raise ProtocolError(f"{place} of a report has {len(found)} parts, not {len(kinds)}")
    return tuple(_read(kind, each, place) for kind, each in zip(kinds, found, strict=True))


def _read_object(wanted: Any, data: object, place: str) -> Any:
    found: Mapping[str, object] = _checked(data, dict, place)
    hints = _hints(wanted)
    required = {each.name for each in fields(wanted) if each.default is MISSING}
    missing = required - found.keys()
    if missing:
        raise ProtocolError(f"{place} of a report lacks {', '.join(sorted(missing))}")
    return wanted(
        **{
            name: _read(kind, found[name], f"{place}.{name}")
            for name, kind in hints.items()
            if name in found
        }
    )


def _checked(data: object, wanted: type, place: str) -> Any:
    if type(data) is not wanted:
        raise ProtocolError(
            f"{place} of a report is a {type(data).__name__}, not a {wanted.__name__}; observe "
            "with the version of Weft that the workers have"
        )
    return data


@functools.cache
def _hints(wanted: Any) -> types.MappingProxyType[str, Any]:
    hints = typing.get_type_hints(wanted)
    return types.MappingProxyType({field.name: hints[field.name] for field in fields(wanted)})


WHO, REPORT, DETAIL, METRICS = "who", "report", "detail", "metrics"
"""The questions of an observer. ``DETAIL`` asks for stacks and references as well as a report,
``METRICS`` for a report without calls and threads."""
FACTS, MEASURE = "facts", "measure "
"""Further questions, for ``WorkerFacts`` and ``PairFacts``; the name of another worker follows the
second one."""

MESSAGES, LENT = "messages", "lent"
"""Stand among the channels for the connection of messages, and for shared memory that the other
worker uses in place: its bytes do not move."""

FILE_SUFFIX = ".weft.json"
"""Ends the name of a file with a report."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group, as another worker knows it.

    Attributes:
        name: Its name.
        rank: Its rank.
        id: The id of its life in the protocols.
        host: The name of its host.
        addresses: Where it listens, best first.
        state: Its state as the other worker sees it: a text of ``WorkerState``.
        cause: Why it is lost; empty if it is not.
    """

    name: str
    rank: int
    id: int
    host: str
    addresses: tuple[str, ...]
    state: str
    cause: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker, and its group.

    Attributes:
        worker: Its name.
        rank: Its rank.
        host: The name of its host.
        pid: Its process id there.
        group: Names the group: the same text from all of its workers.
        program: The main program; empty if unknown.
        members: All workers that it knows, itself included.
    """

    worker: str
    rank: int
    host: str
    pid: int
    group: str
    program: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes exchanged with one other worker.

    Attributes:
        worker: Its name.
        sent: Bytes sent over the connection for messages.
        received: Bytes received over it.
        by_channel: Bytes of tensors that went by other channels, by ``"sent shm"`` and the like;
            ``"lent"`` for tensors that the peer uses in this worker's memory.
    """

    worker: str
    sent: int
    received: int
    by_channel: dict[str, int]

    def moved(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes sent and received, by channel and for ``MESSAGES``."""
        found = {MESSAGES: (self.sent, self.received)}
        for name, count in self.by_channel.items():
            direction, _, channel = name.partition(" ")
            sent, received = found.get(channel or LENT, (0, 0))
            is_received = direction == "received"
            pair = (sent, received + count) if is_received else (sent + count, received)
            found[channel or LENT] = pair
        return found


@dataclass(frozen=True, slots=True)
class FunctionCounts:
    """The calls of one function that have ended while they were counted.

    Attributes:
        function: Its name.
        direction: ``"out"`` for calls that the worker made, ``"in"`` for those it served.
        calls: How many have ended.
        errors: How many of them with an error.
        times: How many took how long, by bucket; see above.
        seconds: How long all of these took together.
    """

    function: str
    direction: str
    calls: int
    errors: int
    times: dict[str, int]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that the worker has made and that has not ended.

    Attributes:
        key: Names the call, at the callee as well.
        callee: The worker that was called.
        function: The called function.
        age_s: Seconds since it was made.
        parent: Key of the served call in the course of which it was made; empty if there is none.
    """

    key: str
    callee: str
    function: str
    age_s: float
    parent: str


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A call of another worker that has not ended.

    Attributes:
        key: Names the call, at the caller as well.
        caller: The worker that called.
        function: The called function.
        age_s: Seconds since it arrived.
        has_begun: Whether it runs; if not, it waits in line.
        makes: The reference to the value that it makes; empty if it makes none.
        awaits: The reference to the value for which it waits, without a thread; empty if to none.
    """

    key: str
    caller: str
    function: str
    age_s: float
    has_begun: bool
    makes: str
    awaits: str


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread, or a coroutine.

    Attributes:
        name: Its name.
        is_idle: Whether it is a thread of Weft without work.
        is_own: Whether it is a thread of Weft that runs no code of the program.
        is_main: Whether it is the main thread.
        serves: Key of the served call that it runs; empty if none.
        waits: What it waits for; several if it waits for several calls.
        is_at_lock: Whether it waits for a lock, or for another thread, of the program.
        place: The innermost line of the program, as ``file:line in function``.
        frames: Its frames, innermost last, as in a traceback; none without details.
        needs_any: Whether any of several ``waits`` lets it go on; if not, it needs all.
    """

    name: str
    is_idle: bool
    is_own: bool
    is_main: bool
    serves: str
    waits: tuple[Wait, ...]
    is_at_lock: bool
    place: str
    frames: tuple[str, ...]
    needs_any: bool = False


@dataclass(frozen=True, slots=True)
class HeldReference:
    """A reference, or a value that the worker owns.

    Attributes:
        reference: Names it.
        owner: The worker that owns the value.
        made_at: Where it was made, and by what; empty if on another worker.
        size_bytes: Bytes of the tensors in the value; 0 if it is on another worker.
    """

    reference: str
    owner: str
    made_at: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something rare that happened at a worker.

    Attributes:
        age_s: Seconds ago.
        text: What happened.
    """

    age_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a worker tells of itself.

    Attributes:
        identity: Who it is.
        clock_s: Its monotonic clock, by which two reports of one worker are compared.
        time: The time of day, in seconds since the epoch.
        cpu_s: Seconds of processor time that its process has used.
        memory_bytes: Resident memory of its process.
        counted_since_s: Seconds since calls have been counted; negative if they are not.
        slots: How many functions of the program run at a time.
        running: How many run, without those that wait for other workers.
        queued: How many tasks wait for a slot.
        traffic: Bytes by other worker.
        functions: Counts of calls by function.
        made: Calls that it has made and that have not ended.
        served: Calls that it serves.
        threads: Its threads and coroutines.
        owned: How many values it owns that are referred to.
        held: How many references to values of other workers it holds.
        references: The largest of the values, and some of the references; none without details.
        contexts: How many autograd contexts it has.
        passes: How many backward passes are under way there.
        events: The last rare events, the oldest first.
        numbers: What its components tell of themselves.
        in_flight: How many calls it has made that have not ended; ``made`` names the oldest.
        serving: How many calls it serves; ``served`` names the oldest.
    """

    identity: Identity
    clock_s: float
    time: float
    cpu_s: float
    memory_bytes: int
    counted_since_s: float
    slots: int
    running: int
    queued: int
    traffic: tuple[Traffic, ...]
    functions: tuple[FunctionCounts, ...]
    made: tuple[OpenCall, ...]
    served: tuple[ServedCall, ...]
    threads: tuple[Thread, ...]
    owned: int
    held: int
    references: tuple[HeldReference, ...]
    contexts: int
    passes: int
    events: tuple[Event, ...]
    numbers: tuple[NumberTable, ...] = ()
    in_flight: int = 0
    serving: int = 0

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self.identity.worker

    def moved(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Returns the bytes sent and received, by other worker and channel."""
        return {
            (each.worker, channel): pair
            for each in self.traffic
            for channel, pair in each.moved().items()
        }


# The facts of hosts and of ways between workers, for ``torchweft doctor``


class Devices(NamedTuple):
    """What one worker has.

    Attributes:
        host: Name of its host.
        device: The device that it trains on: ``"cpu"`` or ``"cuda:0"``.
        backends: The back ends that its PyTorch has: of ``gloo``, ``nccl`` and ``mpi``.
        has_infiniband: Whether a port of InfiniBand is active.
        has_ip_over_infiniband: Whether a network interface runs over InfiniBand.
        address: The IP address at which workers of other hosts reach it; that of the loopback if it
            listens on its host only.
    """

    host: str
    device: str = "cpu"
    backends: tuple[str, ...] = ("gloo",)
    has_infiniband: bool = False
    has_ip_over_infiniband: bool = False
    address: str = addresses.LOOPBACK


class Route(NamedTuple):
    """The way from this worker to another one.

    Attributes:
        is_one_host: Whether both are on one host.
        is_one_network: Whether both are in one network namespace, so that no network is between.
        own_address: The IP address of this host on the way; empty if no network is between, or if
            there is no way.
        inline_bytes: The largest tensor that travels within its message.
        channels: The channels of larger tensors, best first, with the size of their smallest one.
        obstacles: Why each channel is not used; empty where it is. Channels for hardware that is
            not here, and those that were not tried yet, are left out.
    """

    is_one_host: bool
    is_one_network: bool
    own_address: str
    inline_bytes: int
    channels: tuple[tuple[str, int], ...]
    obstacles: tuple[tuple[str, str], ...]


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


def encode(answer: Any) -> bytes:
    """Returns an answer, an object of a dataclass, as JSON; ``decode`` reads it."""
    return json.dumps(asdict(answer)).encode()


def decode(wanted: type[T], data: str | bytes) -> T:
    """Reads the answer to a question: an object of a dataclass.

    Raises:
        ProtocolError: It is malformed; see ``read``.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a report is no JSON: {error}") from error
    return read(wanted, found)


# The observer's side of a question

MOST_BYTES = 64 << 20
"""Largest answer accepted."""

_CREDENTIALS = struct.Struct("iII")


def ask(
    address: str, question: str, secret: Secret | None, tls: TlsOptions | None, timeout_s: float
) -> bytes:
    """Asks the worker that listens at an address; returns its answer. Blocks for ``timeout_s``.

    Args:
        address: One of those that a worker tells, as ``tcp:HOST:PORT``.
        question: One of the questions above.
        secret: The secret of the group; None if it has none.
        tls: How connections over TCP are secured; None for no TLS.
        timeout_s: Seconds to wait at most.

    Raises:
        ObserverRefused: The worker has another secret, or only one of the two has one.
        ProtocolError: No worker of this version listens there; or without a secret, it is another
            user's.
        TimeoutError: It has not answered in time: it is stopped, or code in C keeps it busy.
        OSError: Nothing listens there.
        ConfigurationError: The address is malformed, or the worker wants TLS.
    """
    deadline_s = time.monotonic() + timeout_s
    with _connected(address, tls, deadline_s) as connection:
        try:
            handshake = Handshake.dial(connection, key_of_observers(secret), deadline_s)
            if secret is None:
                check_user(connection)
            facts = Hello(Purpose.OBSERVE, question=question).facts()
            handshake.send(Kind.HELLO, Greeting(OBSERVER, facts=facts))
            refusal = handshake.receive(Kind.WELCOME).refusal
        except NotProven as error:
            raise ObserverRefused(f"the worker at {address} has another secret") from error
        if refusal:
            raise ProtocolError(refusal)
        return _receive_answer(connection, deadline_s)


def listeners_here() -> list[str]:
    """Returns the addresses of this host's workers, also of other groups and users."""
    return list(map(str, addresses.unix_listeners()))


def process_at(address: str) -> int | None:
    """Returns the id of the process that listens at an address of this host.

    The kernel tells, so the process need not answer. None if nothing listens there, or if it is no
    Unix socket.
    """
    try:
        place = addresses.parse(address)
        if not isinstance(place, addresses.UnixAddress):
            return None
        with addresses.dial(place, 1.0) as connection:
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ConfigurationError):
        return None
    process: int = _CREDENTIALS.unpack(data)[0]
    return process


def may_reach(address: str, *, is_here: bool) -> bool:
    """Whether a worker can be asked at one of its addresses.

    Args:
        address: The address.
        is_here: Whether the worker is on this host.
    """
    return is_here or addresses.is_far(addresses.parse(address))


@contextlib.contextmanager
def _connected(text: str, tls: TlsOptions | None, deadline_s: float) -> Iterator[socket.socket]:
    address = addresses.parse(text)
    connection = addresses.dial(address, max(deadline_s - time.monotonic(), 0.01))
    try:
        if isinstance(address, addresses.TcpAddress) and (address.is_secure or tls is not None):
            if tls is None:
                raise ConfigurationError(
                    f"the worker at {text} wants TLS: set WEFT_TLS_CERT, WEFT_TLS_KEY and "
                    "WEFT_TLS_CA as for a worker"
                )
            connection = secure_client(connection, tls, max(deadline_s - time.monotonic(), 0.01))
        yield connection
    finally:
        connection.close()


def _receive_answer(connection: socket.socket, deadline_s: float) -> bytes:
    kind, _, buffers, size, _ = HEADER.unpack(_receive(connection, HEADER.size, deadline_s))
    if kind != Kind.REPORT or buffers or size > MOST_BYTES:
        raise ProtocolError("the worker does not answer as one of this version of Weft")
    return _receive(connection, size, deadline_s)


def _receive(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer took too long")
        connection.settimeout(left_s)
        part = connection.recv(min(size_bytes - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the worker closed the connection before it had answered")
        data += part
    return bytes(data)
