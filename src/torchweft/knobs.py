"""Every tunable of Weft in one place: the variables of operators, and the constants.

A *knob* is for operators of workers: an address, a secret, a time limit, a share of the memory. It
is an environment variable, named ``WEFT_`` and the name of the knob. ``docs/variables.md`` lists
all of them.

A *constant* is a number that Weft's authors have measured, and that operators need not change.
Tests and benchmarks may: ``WEFT_INTERNAL`` sets the constants of a process and of the processes
that it starts, as ``SPIN_S=0,REARM_S=60``. Constants and this variable may change with any version.

Both are read when the object that they tune is made (a worker, a connection, a pool), never in a
hot path. A test may also set one for a while, within its own process::

    with knobs.INLINE_LIMIT_BYTES.override(0):
        ...

Sizes may be written with a unit, as ``256MiB`` or ``1GB``; times are plain seconds. A variable that
begins with ``WEFT_`` and is none of these is a mistake: ``check_environment`` refuses it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torchweft.arguments import did_you_mean
from torchweft.errors import ConfigurationError

INTERNAL_VARIABLE = "WEFT_INTERNAL"
"""Environment variable with the constants that a test or a benchmark sets."""

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?) *([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}

Value = TypeVar("Value", int, float, str)


class _Tunable(Generic[Value]):
    """A value with a default that the environment, or a test, may change.

    Args:
        name: Its name, which is also that of the module's attribute.
        default: Value used if no other is set; its type decides what is accepted.
    """

    _shared_variable = ""

    def __init__(self, name: str, default: Value) -> None:
        self.name = name
        self.variable = self._shared_variable or f"WEFT_{name}"
        self.default: Value = default
        self._override: Value | None = None

    def get(self) -> Value:
        """Returns the value in force now."""
        if self._override is not None:
            return self._override
        text = os.environ.get(self.variable)
        return self.default if text is None else self.read(text)

    def read(self, text: str) -> Value:
        """Returns the value that the text of the variable means for this tunable.

        Raises:
            ConfigurationError: The text is invalid.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def override(self, value: Value) -> Iterator[None]:
        """Puts ``value`` in force within a ``with`` block, in this process."""
        previous, self._override = self._override, value
        try:
            yield
        finally:
            self._override = previous

    def _value_of(self, text: str, said: str, fix: str) -> Value:
        """Returns the value that a text means; raises ConfigurationError if it is invalid.

        Args:
            text: The text.
            said: What the variable says, for the message.
            fix: What to do instead.
        """
        try:
            read = _size_of if self.name.endswith("_BYTES") else type(self.default)
            value: Any = read(text)
            default: Any = self.default
            # A negative value has a meaning only where the default has one, and NaN has none.
            if isinstance(value, str) or value >= 0 or (value < 0 and default < 0):
                return value  # type: ignore[no-any-return]
        except ValueError:
            pass
        raise ConfigurationError(
            f"environment variable {self.variable} {said}, which is no {self._kind()}; {fix}"
        )

    def _kind(self) -> str:
        if self.name.endswith("_BYTES"):
            return "size, as 65536, 64KiB or 256MB"
        if isinstance(self.default, int):
            return "whole number"
        return "number of seconds" if self.name.endswith("_S") else "number"


class Knob(_Tunable[Value]):
    """A value that an operator may set, by an environment variable of its own."""

    def read(self, text: str) -> Value:
        """Returns the value that a text means; raises ConfigurationError if the text is invalid."""
        fix = f"unset it or set it like {self.variable}={self.default}"
        return self._value_of(text, f"is {text!r}", fix)


class Constant(_Tunable[Value]):
    """A value that only tests and benchmarks of Weft may set, by ``WEFT_INTERNAL``."""

    _shared_variable = INTERNAL_VARIABLE

    def read(self, text: str) -> Value:
        """Returns the value that ``WEFT_INTERNAL`` has for this constant, or else the default.

        Raises:
            ConfigurationError: It cannot be read.
        """
        own = _settings_of(text).get(self.name)
        if own is None:
            return self.default
        fix = f"leave it out or set it like {self.name}={self.default}"
        return self._value_of(own, f"sets {self.name} to {own!r}", fix)


def _settings_of(text: str) -> dict[str, str]:
    """Returns the texts in ``WEFT_INTERNAL`` by constant; the last one counts for a repeated name.

    Raises:
        ConfigurationError: A part has no name or no value.
    """
    settings = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise ConfigurationError(
                f"environment variable {INTERNAL_VARIABLE} has a part {part!r}, which sets no "
                f"constant; unset it or set it like {INTERNAL_VARIABLE}=SPIN_S=0,REARM_S=60"
            )
        settings[name] = value
    return settings


def _size_of(text: str) -> int:
    """Returns the bytes that a text means; raises ValueError if the text is invalid."""
    from fractions import Fraction  # It imports much, and few processes set a size.

    found = _SIZE.fullmatch(text.strip())
    if found is None or ("b" in text.lower()) < bool(found[2]):
        raise ValueError("no size, or a unit like M, which may mean MB or MiB")
    size = Fraction(found[1]) * _UNITS[(found[2] or "").lower()]
    if size.denominator != 1:
        raise ValueError("a part of a byte")
    return int(size)


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Checks that all variables of Weft are known and can be read.

    Args:
        environment: The variables; by default those of this process.

    Raises:
        ConfigurationError: Some are not; the message names them, and what may be meant.
    """
    if environment is None:
        environment = os.environ
    knobs = {each.variable: each for each in globals().values() if isinstance(each, Knob)}
    constants = {each.name: each for each in globals().values() if isinstance(each, Constant)}
    problems: list[str] = []
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith("WEFT_") or variable.startswith(_RESERVED):
            continue
        if variable in _OTHERS:
            continue
        if variable == INTERNAL_VARIABLE:
            problems += _internal_problems(text, constants)
        elif variable in knobs:
            problems += _problems(knobs[variable], text)
        else:
            known = did_you_mean(variable, [*knobs, *_OTHERS], "WEFT_")
            problems.append(f"environment variable {variable} is unknown to Weft{known}")
    if problems:
        raise ConfigurationError("; ".join(problems))


def _problems(tunable: _Tunable[Any], text: str) -> list[str]:
    """Returns the message about a text that a tunable cannot read; empty if it can."""
    try:
        tunable.read(text)
    except ConfigurationError as error:
        return [str(error)]
    return []


def _internal_problems(text: str, constants: Mapping[str, Constant[Any]]) -> list[str]:
    """Returns the messages about a text of ``WEFT_INTERNAL``."""
    try:
        names = sorted(_settings_of(text))
    except ConfigurationError as error:
        return [str(error)]
    problems: list[str] = []
    for name in names:
        if name in constants:
            problems += _problems(constants[name], text)
        else:
            problems.append(
                f"environment variable {INTERNAL_VARIABLE} sets {name}, which is no constant of "
                f"Weft{did_you_mean(name, constants)}"
            )
    return problems


_OTHERS = frozenset(
    (
        "WEFT_SECRET WEFT_WORKER_NAME WEFT_INIT_METHOD WEFT_RESTART_COUNT WEFT_DEVICE "
        "WEFT_DEATH_NOTE WEFT_NOTICE_FILE"
    ).split()
)
"""Variables that are not knobs: the secret itself, and what launchers tell their workers."""

_RESERVED = ("WEFT_TEST_", "WEFT_BENCHMARK_")
"""Prefixes of the variables for Weft's own tests and benchmarks."""

# What operators may turn, in the order of docs/variables.md.

LISTEN = Knob("LISTEN", "")
"""Address on which workers of other hosts reach this worker. Empty: with a secret, this host's
address on the way to the rendezvous store; without, loopback."""
SECRET_FILE = Knob("SECRET_FILE", "")
"""File with the secret that all workers of a group share; only its owner may read it."""
TLS_CERT = Knob("TLS_CERT", "")
"""File with this worker's certificate, in PEM; where it is set, TCP connections use TLS."""
TLS_KEY = Knob("TLS_KEY", "")
"""File with the key of the certificate; empty where the file of the certificate has both."""
TLS_CA = Knob("TLS_CA", "")
"""File with the authorities that sign the certificates of all workers, in PEM."""
TLS_MUTUAL = Knob("TLS_MUTUAL", 1)
"""1 if a worker that connects must show a certificate too, 0 if not."""
TLS_NAME = Knob("TLS_NAME", "")
"""Name or address that the certificates of other workers must be made out to; empty for any."""
TLS_NAMES = (TLS_CERT, TLS_KEY, TLS_CA, TLS_NAME)
"""Those that name a file or a worker: a worker has TLS if any is set."""
INIT_TIMEOUT_S = Knob("INIT_TIMEOUT_S", 60.0)
"""Time to wait for all workers to join."""
CONNECT_TIMEOUT_S = Knob("CONNECT_TIMEOUT_S", 10.0)
"""Time to connect to another worker, handshake included; also the time that a stranger has to prove
that it belongs to the group."""
RPC_TIMEOUT_S = Knob("RPC_TIMEOUT_S", 60.0)
"""Time that a call may take unless it says otherwise."""
BACKWARD_TIMEOUT_S = Knob("BACKWARD_TIMEOUT_S", 1800.0)
"""Time that a distributed backward pass may take."""
CHECKPOINT_TIMEOUT_S = Knob("CHECKPOINT_TIMEOUT_S", 1800.0)
"""Time that saving or restoring a snapshot may take."""
DETECTION_S = Knob("DETECTION_S", 15.0)
"""Time without an answer of a worker's machine after which the worker is lost."""
RECONNECT_S = Knob("RECONNECT_S", 15.0)
"""Time within which a broken connection is made again, or the worker is lost."""
LAUNCH_GRACE_S = Knob("LAUNCH_GRACE_S", 5.0)
"""Time between asking a worker process to end and killing it."""
LEAVE_TIMEOUT_S = Knob("LEAVE_TIMEOUT_S", 30.0)
"""Time that leaving a ``torchweft.cluster`` may take; then workers that are stuck are named and
killed."""
WORKER_THREADS = Knob("WORKER_THREADS", 16)
"""User functions that one worker runs at a time."""
POOL_LIMIT_BYTES = Knob("POOL_LIMIT_BYTES", 1 << 30)
"""Warm receive buffers that one worker keeps for reuse."""
SHM_LIMIT_BYTES = Knob("SHM_LIMIT_BYTES", -1)
"""Shared memory that one worker may have; 0 for none, negative for a quarter of the memory that is
left when it joins, at most 4 GiB."""
CUDA_IPC = Knob("CUDA_IPC", 1)
"""1 to copy tensors from GPU to GPU where two workers are on one host, 0 to send them through the
host's memory."""
PINNED_LIMIT_BYTES = Knob("PINNED_LIMIT_BYTES", 1 << 30)
"""Page-locked host memory that one worker may have for copies to and from GPUs; 0 for none."""
RDMA = Knob("RDMA", "auto")
"""``auto`` to send large tensors to other hosts by RDMA where PyTorch can and there is a device,
``0`` for never, ``1`` to try it also without a device and within a host."""
NATIVE = Knob("NATIVE", "auto")
"""``auto`` for the twin in C where it was built, ``0`` for the one in Python, ``1`` to demand the
one in C."""
SESSION_LIMIT_BYTES = Knob("SESSION_LIMIT_BYTES", 256 << 20)
"""Bytes on their way to one worker of another host beyond which senders wait."""
FRAME_LIMIT_BYTES = Knob("FRAME_LIMIT_BYTES", 1 << 36)
"""Largest message that a worker accepts, tensors included."""
QUEUE_LIMIT_CALLS = Knob("QUEUE_LIMIT_CALLS", 1 << 16)
"""Calls of one worker that may wait at another; more are refused with ``QueueFull``."""
QUEUE_LIMIT_BYTES = Knob("QUEUE_LIMIT_BYTES", 1 << 30)
"""Bytes that the waiting calls of one worker may have together."""
STRANGER_LIMIT = Knob("STRANGER_LIMIT", 64)
"""Connections that have not proved yet that they belong to the group; beyond it, the oldest one
without a member's voucher is closed."""
ALLOWED_MODULES = Knob("ALLOWED_MODULES", "")
"""Modules, with commas between them, whose functions and classes other workers may use; empty for
all. For workers whose options name none."""
WAIT_NOTICE_S = Knob("WAIT_NOTICE_S", 10.0)
"""Time after which a wait for other workers is reported in the log, once; 0 for never."""
STACKS_SIGNAL = Knob("STACKS_SIGNAL", "SIGUSR1")
"""Signal on which a worker writes the stacks of its threads to standard error, where the program
has not set a handler for it; empty for none."""
COUNTERS = Knob("COUNTERS", 0)
"""1 to count the calls of each function at all times, 0 only while ``torchweft top`` watches."""
METRICS = Knob("METRICS", "")
"""Address and port at which a worker serves its metrics for Prometheus, as 9400 or 0.0.0.0:9400;
its local rank is added to the port. Empty for none."""
DUMP_DIR = Knob("DUMP_DIR", "")
"""Folder in which each worker writes what it does, on SIGQUIT or after a long wait; empty for one
of this user and group among the temporary files."""
DUMP_AFTER_S = Knob("DUMP_AFTER_S", 0.0)
"""Time after which a wait for other workers makes all workers write what they do; 0 for never."""
TRACEBACKS = Knob("TRACEBACKS", "short")
"""``short`` for tracebacks without the frames of Weft itself, ``full`` for all frames."""

# The constants.

REFERENCE_ARRIVAL_S = Constant("REFERENCE_ARRIVAL_S", 5.0)
"""Seconds after which a worker that leaves takes back references that were handed on in vain."""
REFERENCE_BATCH_S = Constant("REFERENCE_BATCH_S", 0.02)
"""Seconds that ended references are collected before they are told."""
STALL_S = Constant("STALL_S", 0.002)
"""Seconds a queued call may wait before another thread is woken."""
REARM_S = Constant("REARM_S", 0.005)
"""Seconds a connection may go unread while a message of it is being handled."""
SPIN_S = Constant("SPIN_S", 100e-6)
"""Seconds a waiting thread may look for data before it sleeps; 0 for never."""
SWITCH_INTERVAL_S = Constant("SWITCH_INTERVAL_S", 0.0005)
"""Seconds a thread that computes in Python lets an arriving call wait; 0 leaves Python's own."""
FAN_OUT = Constant("FAN_OUT", 4)
"""Workers to which one worker sends what the parts of a map have in common; with more of them, they
pass it on."""
UNIX_SOCKETS = Constant("UNIX_SOCKETS", 1)
"""1 to reach peers on this host by Unix sockets, 0 to reach them by TCP."""
RECEIVE_BUFFER_BYTES = Constant("RECEIVE_BUFFER_BYTES", 512 * 1024)
"""Bytes read from a connection at once. The main thread leaves larger messages to other threads."""
CONTROL_LIMIT_BYTES = Constant("CONTROL_LIMIT_BYTES", 1 << 31)
"""Bytes that the control part of one message may have."""
TENSOR_LIMIT = Constant("TENSOR_LIMIT", 65_535)
"""Tensors that one message may have."""
INLINE_LIMIT_BYTES = Constant("INLINE_LIMIT_BYTES", 256 * 1024)
"""Bytes up to which a tensor travels inside the control write."""
CMA_FROM_BYTES = Constant("CMA_FROM_BYTES", 1 << 20)
"""Bytes from which a tensor is pulled out of the sender's memory."""
SHM_FROM_BYTES = Constant("SHM_FROM_BYTES", 1 << 17)
"""Bytes from which a tensor goes through shared memory."""
SHARED_COPY_BYTES = Constant("SHARED_COPY_BYTES", 16 << 20)
"""Bytes from which two threads share the copying of a tensor."""
POOL_IDLE_S = Constant("POOL_IDLE_S", 10.0)
"""Seconds after which warm memory that nobody uses is given back."""
STRIPED_FROM_BYTES = Constant("STRIPED_FROM_BYTES", 2 << 20)
"""Bytes from which the tensors of a message travel over connections of their own, where no memory
is shared."""
STRIPE_BYTES = Constant("STRIPE_BYTES", 4 << 20)
"""Bytes of the pieces that such a tensor is cut into."""
STRIPE_CONNECTIONS = Constant("STRIPE_CONNECTIONS", 2)
"""Connections for large tensors that one worker makes to a peer."""
STRIPE_THREADS = Constant("STRIPE_THREADS", 2)
"""Threads of one worker that send and receive large tensors."""
SMALL_ON_DEVICE_BYTES = Constant("SMALL_ON_DEVICE_BYTES", 64 * 1024)
"""Bytes up to which the tensors on a GPU of one message go through the host, if their values are
there within ``SMALL_ON_DEVICE_S``."""
SMALL_ON_DEVICE_S = Constant("SMALL_ON_DEVICE_S", 300e-6)
"""Seconds that the sender of small tensors on a GPU looks for their values."""
DEVICE_STALL_S = Constant("DEVICE_STALL_S", 60.0)
"""Seconds without the values of a tensor on a GPU, after which its sender is asked for them."""
STRIPE_STALL_S = Constant("STRIPE_STALL_S", 60.0)
"""Seconds without a byte of a tensor that was announced, after which it is asked for again."""
RDMA_FROM_BYTES = Constant("RDMA_FROM_BYTES", 1 << 20)
"""Bytes from which a tensor is read by RDMA; also the size of the smallest slab."""
RDMA_LIMIT_BYTES = Constant("RDMA_LIMIT_BYTES", 1 << 30)
"""Memory of copies of one worker that wait to be read by RDMA, and registered memory that it keeps
for further copies to one peer."""
RDMA_WAYS = Constant("RDMA_WAYS", 16)
"""Peers that one worker sends to, and receives from, by RDMA: each costs a thread that polls."""
RDMA_LEAST_RATE = Constant("RDMA_LEAST_RATE", 2e9)
"""Bytes a second that a trial of RDMA must reach; slower ways are no better than sockets."""
RDMA_STALL_S = Constant("RDMA_STALL_S", 30.0)
"""Seconds that a read by RDMA may take, after which its tensors are asked for again."""
RDMA_TRIAL_S = Constant("RDMA_TRIAL_S", 20.0)
"""Seconds within which two workers must have tried RDMA."""
RESTART_BACKOFF_S = Constant("RESTART_BACKOFF_S", 1.0)
"""Seconds before a worker that died is started again, the first time."""
RESTART_BACKOFF_LIMIT_S = Constant("RESTART_BACKOFF_LIMIT_S", 60.0)
"""Seconds up to which the waits between restarts grow."""
RESTART_WINDOW_S = Constant("RESTART_WINDOW_S", 3600.0)
"""Seconds within which restarts are counted against their limit."""
RESTART_HEALTHY_S = Constant("RESTART_HEALTHY_S", 60.0)
"""Seconds after which a process that ran so long is restarted soon again."""
