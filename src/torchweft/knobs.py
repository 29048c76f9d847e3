"""Every tunable of Weft in one place: default, unit, environment variable.

A knob is read when the thing it tunes is made (a worker, a connection, a pool), never in a hot
path. Set one by its environment variable, or in a test with ``override``::

    with knobs.INLINE_LIMIT_BYTES.override(0):
        ...

Sizes may be written with a unit, as ``256MiB`` or ``1GB``; times are plain seconds. A variable that
begins with ``WEFT_`` and is none of these is a mistake: ``check_environment`` refuses it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from torchweft.arguments import did_you_mean
from torchweft.errors import ConfigurationError

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?) *([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}

Value = TypeVar("Value", int, float, str)


class Knob(Generic[Value]):
    """A value with a default that the environment, or a test, may change.

    Args:
        name: Name of the knob; the environment variable is ``WEFT_`` and this name.
        default: Value used when nothing else is said; its type decides what is accepted.
        meaning: One sentence for the documentation, with the unit.
    """

    def __init__(self, name: str, default: Value, meaning: str) -> None:
        self.variable = f"WEFT_{name}"
        self.default: Value = default
        self.meaning = meaning
        self._override: Value | None = None

    def get(self) -> Value:
        """Returns the value in force now."""
        if self._override is not None:
            return self._override
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        return self.read(text)

    def read(self, text: str) -> Value:
        """Returns the value that a text means; raises ConfigurationError where it means none."""
        try:
            if self.variable.endswith("_BYTES"):
                return _size_of(text)  # type: ignore[return-value]
            value = type(self.default)(text)
            if isinstance(value, float) and math.isnan(value):
                raise ValueError("not a number")
        except ValueError:
            raise ConfigurationError(
                f"environment variable {self.variable} is {text!r}, which is no {self._kind()}; "
                f"unset it or set it like {self.variable}={self.default}"
            ) from None
        return value

    def _kind(self) -> str:
        if self.variable.endswith("_BYTES"):
            return "size, as 65536, 64KiB or 256MB"
        if isinstance(self.default, int):
            return "whole number"
        return "number of seconds" if self.variable.endswith("_S") else "number"

    @contextlib.contextmanager
    def override(self, value: Value) -> Iterator[None]:
        """Puts ``value`` in force within a ``with`` block, in this process."""
        previous, self._override = self._override, value
        try:
            yield
        finally:
            self._override = previous


def _size_of(text: str) -> int:
    """Returns the bytes that a text means; raises ValueError where it means none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or ("b" in text.lower()) < bool(found[2]):
        raise ValueError("no size, or a unit like M, which may mean MB or MiB")
    size = float(found[1]) * _UNITS[(found[2] or "").lower()] if "." in text else None
    if size is None:
        return int(found[1]) * _UNITS[(found[2] or "").lower()]
    if not size.is_integer():
        raise ValueError("a part of a byte")
    return int(size)


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Sees that all variables of Weft are known and can be read.

    Args:
        environment: The variables; by default those of this process.

    Raises:
        ConfigurationError: Some are not; names them, and what may be meant.
    """
    if environment is None:
        environment = os.environ
    knobs = {each.variable: each for each in globals().values() if isinstance(each, Knob)}
    problems = []
    for name in sorted(environment):
        if not name.startswith("WEFT_") or name.startswith(_RESERVED) or name in _OTHERS:
            continue
        if name in knobs:
            try:
                knobs[name].read(environment[name])
            except ConfigurationError as error:
                problems.append(str(error))
        else:
            known = did_you_mean(name, [*knobs, *_OTHERS], "WEFT_")
            problems.append(f"environment variable {name} is unknown to Weft{known}")
    if problems:
        raise ConfigurationError("; ".join(problems))


_OTHERS = frozenset(
    (
        "WEFT_SECRET WEFT_WORKER_NAME WEFT_INIT_METHOD WEFT_RESTART_COUNT WEFT_DEVICE "
        "WEFT_DEATH_NOTE"
    ).split()
)
"""Variables that are no knobs: the secret itself, and what launchers tell their workers."""

_RESERVED = ("WEFT_TEST_", "WEFT_BENCHMARK_")
"""How the names of variables begin that are for Weft's own tests and benchmarks."""

WORKER_THREADS = Knob("WORKER_THREADS", 16, "User functions that one worker runs at a time.")
RPC_TIMEOUT_S = Knob("RPC_TIMEOUT_S", 60.0, "Seconds a call may take unless it says otherwise.")
WAIT_NOTICE_S = Knob(
    "WAIT_NOTICE_S",
    10.0,
    "Seconds after which a wait for other workers is told of in the log, once; 0 for never.",
)
STACKS_SIGNAL = Knob(
    "STACKS_SIGNAL",
    "SIGUSR1",
    "Signal on which a worker writes the stacks of its threads to standard error, where the "
    "program has not set a handler for it; empty for none.",
)
INIT_TIMEOUT_S = Knob("INIT_TIMEOUT_S", 60.0, "Seconds to wait for all workers to join.")
CONNECT_TIMEOUT_S = Knob("CONNECT_TIMEOUT_S", 10.0, "Seconds to wait for a connection to a peer.")
DETECTION_S = Knob(
    "DETECTION_S",
    15.0,
    "Seconds without an answer of a worker's machine after which the worker is lost.",
)
RECONNECT_S = Knob(
    "RECONNECT_S",
    15.0,
    "Seconds within which a broken connection is made again, or the worker is lost.",
)
SESSION_LIMIT_BYTES = Knob(
    "SESSION_LIMIT_BYTES",
    256 << 20,
    "Bytes on their way to one worker of another host beyond which senders wait.",
)
STRANGER_LIMIT = Knob(
    "STRANGER_LIMIT",
    64,
    "Connections that have not proved yet that they belong to the group; the oldest one goes.",
)
REFERENCE_RESEND_S = Knob(
    "REFERENCE_RESEND_S", 5.0, "Seconds after which an unanswered reference message is repeated."
)
REFERENCE_BATCH_S = Knob(
    "REFERENCE_BATCH_S", 0.02, "Seconds that ended references are collected before they are told."
)
RECEIVE_BUFFER_BYTES = Knob(
    "RECEIVE_BUFFER_BYTES", 128 * 1024, "Bytes read from a connection at once."
)
INLINE_LIMIT_BYTES = Knob(
    "INLINE_LIMIT_BYTES", 64 * 1024, "Bytes up to which a tensor travels inside the control write."
)
FRAME_LIMIT_BYTES = Knob(
    "FRAME_LIMIT_BYTES", 1 << 36, "Bytes that one received message may have, tensors included."
)
CONTROL_LIMIT_BYTES = Knob(
    "CONTROL_LIMIT_BYTES", 1 << 31, "Bytes that the control part of one message may have."
)
TENSOR_LIMIT = Knob("TENSOR_LIMIT", 65_535, "Tensors that one message may have.")
ALLOWED_MODULES = Knob(
    "ALLOWED_MODULES",
    "",
    "Modules, with commas between them, whose functions and classes other workers may use; empty "
    "for all. For workers whose options name none.",
)
POOL_LIMIT_BYTES = Knob(
    "POOL_LIMIT_BYTES", 1 << 30, "Bytes of warm receive buffers kept for reuse by one worker."
)
CMA_FROM_BYTES = Knob(
    "CMA_FROM_BYTES", 1 << 20, "Bytes from which a tensor is pulled out of the sender's memory."
)
SHM_FROM_BYTES = Knob(
    "SHM_FROM_BYTES", 1 << 17, "Bytes from which a tensor goes through shared memory."
)
SHM_LIMIT_BYTES = Knob(
    "SHM_LIMIT_BYTES",
    -1,
    "Bytes of shared memory that one worker may have; 0 for none, negative for a quarter of the "
    "memory that is left when it joins, at most 4 GiB.",
)
SHARED_COPY_BYTES = Knob(
    "SHARED_COPY_BYTES", 16 << 20, "Bytes from which two threads share the copying of a tensor."
)
POOL_IDLE_S = Knob(
    "POOL_IDLE_S", 10.0, "Seconds after which warm memory that nobody uses is given back."
)
SHARED_PULL_BYTES = Knob(
    "SHARED_PULL_BYTES", 4 << 20, "Bytes from which two threads share the pulling of a tensor."
)
STRIPED_FROM_BYTES = Knob(
    "STRIPED_FROM_BYTES",
    2 << 20,
    "Bytes from which the tensors of a message travel over connections of their own, where no "
    "memory is shared.",
)
STRIPE_BYTES = Knob("STRIPE_BYTES", 4 << 20, "Bytes of the pieces that such a tensor is cut into.")
STRIPE_CONNECTIONS = Knob(
    "STRIPE_CONNECTIONS", 2, "Connections for large tensors that one worker makes to a peer."
)
STRIPE_THREADS = Knob(
    "STRIPE_THREADS", 2, "Threads of one worker that send and receive large tensors."
)
STRIPE_STALL_S = Knob(
    "STRIPE_STALL_S",
    60.0,
    "Seconds without a byte of a tensor that was announced, after which it is asked for again.",
)
UNIX_SOCKETS = Knob(
    "UNIX_SOCKETS", 1, "1 to reach peers on this host by Unix sockets, 0 to reach them by TCP."
)
LISTEN = Knob(
    "LISTEN",
    "",
    "Address on which workers of other hosts reach this one, where its options name none. Empty: "
    "with a secret, this host's address on the way to the rendezvous store; without, loopback.",
)
BACKWARD_TIMEOUT_S = Knob(
    "BACKWARD_TIMEOUT_S", 1800.0, "Seconds a distributed backward pass may take."
)
SPIN_S = Knob(
    "SPIN_S", 200e-6, "Seconds a waiting thread may look for data before it sleeps; 0 for never."
)
LONG_SPIN_S = Knob(
    "LONG_SPIN_S", 1e-3, "Seconds it may look where no thread of the machine waits for a core."
)
QUEUE_LIMIT_CALLS = Knob(
    "QUEUE_LIMIT_CALLS", 1 << 16, "Calls of one worker that may wait at another; more are refused."
)
QUEUE_LIMIT_BYTES = Knob(
    "QUEUE_LIMIT_BYTES", 1 << 30, "Bytes that the waiting calls of one worker may have together."
)
STALL_S = Knob("STALL_S", 0.002, "Seconds a queued call may wait before another thread is woken.")
REARM_S = Knob(
    "REARM_S", 0.005, "Seconds a connection may go unread while a message of it is being handled."
)
SWITCH_INTERVAL_S = Knob(
    "SWITCH_INTERVAL_S",
    0.0005,
    "Seconds a thread that computes in Python lets an arriving call wait; 0 leaves Python's own.",
)
FAN_OUT = Knob(
    "FAN_OUT",
    4,
    "Workers to which one worker sends what the parts of a map have in common; with more of them, "
    "they pass it on.",
)
CHECKPOINT_TIMEOUT_S = Knob(
    "CHECKPOINT_TIMEOUT_S", 1800.0, "Seconds that saving or restoring a snapshot may take."
)
TRACEBACKS = Knob(
    "TRACEBACKS",
    "short",
    "'short' for tracebacks without the frames of Weft itself, 'full' for all frames.",
)
LAUNCH_GRACE_S = Knob(
    "LAUNCH_GRACE_S", 5.0, "Seconds between asking a worker process to end and killing it."
)
LEAVE_TIMEOUT_S = Knob(
    "LEAVE_TIMEOUT_S",
    30.0,
    "Seconds that leaving a cluster may take; then what is stuck is told of and killed.",
)
RESTART_BACKOFF_S = Knob(
    "RESTART_BACKOFF_S", 1.0, "Seconds before a worker that died is started again, the first time."
)
RESTART_BACKOFF_LIMIT_S = Knob(
    "RESTART_BACKOFF_LIMIT_S", 60.0, "Seconds up to which the waits between restarts grow."
)
RESTART_WINDOW_S = Knob(
    "RESTART_WINDOW_S", 3600.0, "Seconds within which restarts are counted against their limit."
)
RESTART_HEALTHY_S = Knob(
    "RESTART_HEALTHY_S", 60.0, "Seconds after which whatever ran so long is restarted soon again."
)
SECRET_FILE = Knob(
    "SECRET_FILE",
    "",
    "File with the secret that all workers of a group share; only this user may read it.",
)
TLS_CERT = Knob(
    "TLS_CERT",
    "",
    "File with this worker's certificate, in PEM; where it is set, TCP connections use TLS.",
)
TLS_KEY = Knob(
    "TLS_KEY", "", "File with the key of that certificate; by default, the same file has both."
)
TLS_CA = Knob(
    "TLS_CA", "", "File with the authorities that sign the certificates of all workers, in PEM."
)
TLS_MUTUAL = Knob(
    "TLS_MUTUAL", 1, "1 if whoever connects must have such a certificate too, 0 if not."
)
TLS_NAME = Knob(
    "TLS_NAME", "", "Name or address that the others' certificates must be made out to, if any."
)
