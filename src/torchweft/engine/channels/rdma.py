"""The channel ``rdma``: large tensors to workers of other hosts, read out of registered memory.

The sender copies a tensor to a registered slab, and the receiver reads that slab. The first large
tensor to a peer makes both sides open the ends of a transport, and read a slab as a trial. Until
that has passed, and after any failure, tensors take the next channel. See
``docs/protocols/channels.md``.

PyTorch has the data plane, ``torch.distributed._transport``, from 2.15 on: memory is registered,
described by bytes, and read by a peer that has the description. It has no control plane: the
exchange of addresses and descriptions is Weft's. PyTorch's interface is not stable; only
``Way`` and ``Transfer`` use it, and these parts of it::

    new_transport(backend, device) -> transport
    transport.bind() -> bytes           .connect(bytes)           .close()
    transport.register_memory(tensor) -> memory                   .unregister_memory(memory)
    transport.read(view, buffer, async_op=True) -> work           all with timeout=seconds
    memory.to_mutable_view(offset, length) -> view                .to_remote_buffer() -> buffer
    buffer.serialize() -> bytes         type(buffer).deserialize(bytes) -> buffer
    work.is_completed() -> bool         .wait(), which raises the error of a transfer

Rules that the interface sets:

- A transport has one peer. A peer reads from the start of registered memory. So every buffer under
  way has memory that was registered for it alone.
- A time limit ends the wait, not the transfer. Memory of a transfer that has not ended must not be
  used again, nor freed.
- ``work.wait`` sleeps for a millisecond at a time, so ``Transfer.query`` looks instead.
- Operations in the order of a CUDA stream end the process if they fail. They are not used.

Registering memory takes longer than reading it. So the sender copies each buffer to a slab of a
warm pool, whose slabs stay registered while the pool keeps them. The receiver reads it into a slab
of its own warm pool, which then is the memory of the tensor. A sender has a pool for each peer: the
peer may read registered memory at any time, which must not have data for others.

A slab comes back when its last view ends. At the sender its ``Staged`` has the view, until the peer
has reported that it has the buffer, or the message is not sent. At the receiver the tensor has it.
A slab whose transfer may still be running does not come back before the transport has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import CannotGet, Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.engine.channels.memory import Budget, BufferPool, Copier, address_of, slab_size
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ConfigurationError, ProtocolError, WeftError

SLAB = struct.Struct("<Q")
"""Begins a handle: the size of a slab. The description of the slab follows."""

NO_DEVICE = "there is no RDMA device with an active port here"
"""The obstacle of most hosts."""

_BACKEND = "nixl"
_MODULE = "torch.distributed._transport"
_DEVICES = Path("/sys/class/infiniband")
_CALL_LIMIT_S = 10.0
"""Seconds that a call may wait for another one of the same transport."""
_CLOSE_LIMIT_S = 2.0
_DIGEST_BYTES = 32
_TRIAL_READS = 5

# The steps of the trial, the first byte of a ``REMOTE_MEMORY``. The sender offers and has a slab
# read; the receiver answers.
OFFER, ANSWER, TRIAL, TRIED, REFUSED = [bytes((number,)) for number in range(1, 6)]


class TransportFailed(CannotGet):
    """Memory of another host could not be read by PyTorch's transport."""


@contextlib.contextmanager
def _failing(action: str) -> Iterator[None]:
    """Raises the errors of a backend, which may be of any type, as TransportFailed."""
    try:
        yield
    except TransportFailed:
        raise
    except Exception as error:
        raise TransportFailed(f"{action} failed: {type(error).__name__}: {error}") from error


class Registration:
    """The registration of a slab, which the slab keeps.

    Attributes:
        tensor: The memory of the slab.
        memory: The registered memory, of PyTorch.
        content: The bytes with which the peer can read it: its size, and the description.
    """

    def __init__(self, tensor: Tensor, memory: Any, content: bytes, ended: deque[Any]) -> None:
        self.tensor, self.memory, self.content = tensor, memory, content
        self._ended = ended

    def __del__(self) -> None:
        # The way ends it: this may run in any thread, at any point.
        self._ended.append((self.tensor, self.memory))


class Transfer:
    """A read that is under way."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def query(self) -> bool:
        """Whether it has ended, also by a failure; its memory is untouched from then on."""
        with _failing("looking at a transfer"):
            return bool(self._work.is_completed())

    def check(self) -> None:
        """Raises TransportFailed if the read, which has ended, has failed."""
        with _failing("a transfer"):
            self._work.wait()


_unclosed: list[Way] = []
"""Ways whose transfers did not end: their memory must live as long as the process."""


class Way:
    """The way to one peer, or from it: this side's end of a transport. Thread-safe.

    Attributes:
        pool: The memory that is registered for it.
        kept: Memory that transfers may still use, here or at the peer.
        trial: The digest of what the peer is to read; empty until it is told to.
        is_proven: Whether the trial has passed.
        failure: Why it is not used any more.

    Args:
        transport: The transport of PyTorch; owned from here on.
        pool: The memory.
    """

    def __init__(self, transport: Any, pool: BufferPool) -> None:
        self.pool = pool
        self.kept: list[memoryview] = []
        self.trial = b""
        self.is_proven = False
        self.failure = ""
        self._transport = transport
        self._lock = threading.RLock()  # A garbage collection may run a finalizer of the user.
        self._buffer_type: Any = None
        self._is_closed = False
        self._ended: deque[Any] = deque()

    def bind(self) -> bytes:
        """Returns the bytes with which the peer connects to this end."""
        with _failing("binding"), self._lock:
            return bytes(self._transport.bind(timeout=_CALL_LIMIT_S))

    def connect(self, url: bytes) -> None:
        """Connects to the peer's end; ``url`` is what ``bind`` returned there."""
        with _failing("connecting"), self._lock:
            self._transport.connect(url, timeout=_CALL_LIMIT_S)

    def lease(self, size_bytes: int) -> tuple[memoryview, Registration]:
        """Returns registered memory; its slab comes back when the last view of it has ended.

        Raises:
            TransportFailed: It cannot be registered.
            MemoryError: The system has no memory left.
        """
        memory = self.pool.lease(size_bytes)
        slab = self.pool.slab_at(address_of(memory))
        assert slab is not None
        found: Registration | None = slab.attached.get(self)
        if found is None:
            found = slab.attached[self] = self._register(torch.from_numpy(slab.memory))
        return memory, found

    def _register(self, tensor: Tensor) -> Registration:
        with _failing("registering memory"), self._lock:
            self._check_open()
            while self._ended:
                _, memory = self._ended.popleft()
                self._transport.unregister_memory(memory, timeout=_CALL_LIMIT_S)
            memory = self._transport.register_memory(tensor, timeout=_CALL_LIMIT_S)
            buffer = memory.to_remote_buffer(timeout=_CALL_LIMIT_S)
            # The type of descriptions is that of the backend, which only its own ones tell.
            self._buffer_type = type(buffer)
            content = SLAB.pack(tensor.numel()) + bytes(buffer.serialize())
        return Registration(tensor, memory, content, self._ended)

    def stage(self, buffer: Tensor, copier: Copier) -> Staged:
        """Copies a buffer to memory that the peer can read; raises as ``lease``."""
        memory, own = self.lease(buffer.nbytes)
        copier.copy(buffer.data_ptr(), address_of(memory), buffer.nbytes, (buffer, memory))
        return Staged(self, own.content, memory)

    def read(self, entry: Entry, into: Registration, limit_s: float) -> Transfer:
        """Begins to read the start of the peer's memory into the start of registered memory.

        If it raises, the transfer may have begun nevertheless: the memory must not be used again.
        """
        slab_bytes = _slab_bytes_in(entry.content)
        if slab_bytes < entry.size_bytes:
            raise ProtocolError(
                f"{entry.size_bytes} bytes are announced in a slab which has {slab_bytes}"
            )
        with _failing("reading a description of memory"):
            remote = self._buffer_type.deserialize(entry.content[SLAB.size :])
        with _failing("beginning a transfer"), self._lock:
            self._check_open()
            view = into.memory.to_mutable_view(0, entry.size_bytes)
            return Transfer(self._transport.read(view, remote, async_op=True, timeout=limit_s))

    def close(self, limit_s: float) -> None:
        """Ends the transport, and its registrations. Blocks until ``limit_s`` at most.

        If transfers do not end in time, their memory is kept as long as the process lives.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._transport.close(timeout=limit_s)
            self.kept.clear()
        except Exception:
            _unclosed.append(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportFailed("the transport has been closed")


def _slab_bytes_in(content: bytes) -> int:
    """Returns the size of the slab that a handle names."""
    if len(content) <= SLAB.size:
        raise ProtocolError(f"a handle of a slab has {len(content)} bytes")
    size_bytes: int = SLAB.unpack_from(content)[0]
    return size_bytes


class Staged(Handle):
    """A copy of a buffer in registered memory, kept until the peer has read it, or is lost."""

    __slots__ = ("_way",)

    def __init__(self, way: Way, content: bytes, memory: memoryview) -> None:
        super().__init__(content, memory.nbytes, memory)
        self._way = way

    def memory(self) -> memoryview:
        """Returns the copy. The slab is not used again: the peer may still be reading it."""
        self._way.kept.append(self.kept)
        return super().memory()


def open_transport() -> Any:
    """Returns a new transport for host memory; raises TransportFailed if the backend has none."""
    with _failing("making a transport"):
        return importlib.import_module(_MODULE).new_transport(_BACKEND, "cpu")


def is_forced() -> bool:
    """Whether RDMA is to be tried without a device and within a host."""
    return knobs.RDMA.get() == "1"


def own_obstacle() -> str:
    """Returns why this process cannot use the channel; empty if a trial may tell.

    PyTorch's module is imported only where the setting and the devices suggest it.

    Raises:
        ConfigurationError: ``WEFT_RDMA`` has a value without meaning.
    """
    setting, variable = knobs.RDMA.get(), knobs.RDMA.variable
    if setting not in ("auto", "0", "1"):
        raise ConfigurationError(
            f"environment variable {variable} is {setting!r}; set it to auto, 0 or 1, or unset it"
        )
    if setting == "0":
        return f"{variable}=0 is set"
    if not is_forced() and not _has_device():
        return NO_DEVICE
    try:
        module = importlib.import_module(_MODULE)
        known = _BACKEND in module.available_transports()
    except (ImportError, AttributeError):
        return f"this PyTorch has no {_MODULE}, which comes with 2.15"
    if not known:
        return f"this PyTorch has no transport {_BACKEND!r}"
    if importlib.util.find_spec(_BACKEND) is None:
        return f"the package {_BACKEND} is not installed"
    return ""


def _has_device() -> bool:
    """Whether a port of some device is active, for instance ``4: ACTIVE``."""
    try:
        return any("ACTIVE" in port.read_text() for port in _DEVICES.glob("*/ports/*/state"))
    except OSError:
        return False


# The channel

_Ways = dict[int, Way | None]
"""The ways to peers, or from them, by the peers' ids; None for those that are being opened."""


class Rdma(Channel):
    """Tensors that the receiver reads by RDMA out of copies in registered memory."""

    name, number = "rdma", 6
    is_tried = True

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.from_bytes = knobs.RDMA_FROM_BYTES.get()
        self._own_obstacle = own_obstacle()
        self._limit_bytes = knobs.RDMA_LIMIT_BYTES.get()
        self._budget = Budget(self._limit_bytes)
        self._way_limit = knobs.RDMA_WAYS.get()
        self._least_rate = 0.0 if is_forced() else knobs.RDMA_LEAST_RATE.get()
        self._trial_s = knobs.RDMA_TRIAL_S.get()
        self._stall_s = knobs.RDMA_STALL_S.get()
        self._lock = threading.RLock()
        self._sending: _Ways = {}
        self._receiving: _Ways = {}
        self._ending: list[Way] = []
        self._is_closed = False
        self._steps = {
            OFFER: self._answer,
            ANSWER: self._begin_trial,
            TRIAL: self._try,
            TRIED: self._judge,
            REFUSED: self._refused,
        }
        home.on(Kind.REMOTE_MEMORY, self._on_step)

    def describe(self) -> dict[str, object]:
        return {"obstacle": self._own_obstacle}

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        """Returns why this process cannot read the peer's memory, as far as is known yet."""
        obstacle = meeting.obstacle(self._own_obstacle)
        if not obstacle and meeting.is_one_host and not is_forced():
            return "the peer is on this host"
        return obstacle

    # Sending

    def put(self, peer: Peer, token: int, buffers: Sequence[Tensor]) -> Sequence[Handle | None]:
        """Copies large buffers to slabs that a peer can read.

        The first call with one for a peer begins the trial, and does not wait for it.
        """
        if max([buffer.nbytes for buffer in buffers]) < self.from_bytes:
            return ()
        if peer.id not in self._sending:
            if not self._reserve(peer, self._sending):
                self._home.reactor.submit(self._take_step, peer, b"")
            return ()
        sending = self._sending.get(peer.id)
        if sending is None or not sending.is_proven:
            return ()
        handles: list[Handle | None] = [None] * len(buffers)
        try:
            for position, buffer in enumerate(buffers):
                if buffer.nbytes >= self.from_bytes and self._budget.reserve(buffer.nbytes):
                    handles[position] = self._stage(sending, buffer)
        except MemoryError:
            pass
        except TransportFailed as error:
            self._fail(peer, str(error), is_sender=True)
        return handles

    def _stage(self, sending: Way, buffer: Tensor) -> Staged:
        """Copies a buffer within the budget, which gets its bytes back with the copy."""
        try:
            staged = sending.stage(buffer, self._home.copier)
        except BaseException:
            self._budget.free(buffer.nbytes)
            raise
        self._budget.free_with(staged.kept.obj, buffer.nbytes)
        return staged

    # The trial

    def _on_step(self, peer: Peer, control: Buffer) -> None:
        # As an urgent task: it may block, and all threads for tasks may be busy for long.
        self._home.reactor.submit(self._take_step, peer, bytes(control))

    def _take_step(self, peer: Peer, control: bytes) -> None:
        """Does one step of a trial, and tells the peer the next one; first of all, the offer."""
        step = self._steps.get(control[:1], self._offer)
        is_sender = control[:1] not in (OFFER, TRIAL)
        with self._home.reactor.idling():
            try:
                answer = step(peer, control[1:])
            except (WeftError, MemoryError) as error:
                self._fail(peer, str(error), is_sender=is_sender)
                answer = b"" if is_sender else REFUSED + str(error).encode()
        if answer:
            self._home.post(peer, Kind.REMOTE_MEMORY, answer)

    def _offer(self, peer: Peer, _: bytes) -> bytes:
        pool = BufferPool(self._limit_bytes)
        return OFFER + self._open(peer, self._sending, pool).bind()

    def _answer(self, peer: Peer, url: bytes) -> bytes:
        """Opens this side's end and connects it; returns what the sender connects to."""
        obstacle = self._reserve(peer, self._receiving)
        if obstacle:
            raise TransportFailed(obstacle)
        way = self._open(peer, self._receiving, self._home.pool)
        own = way.bind()
        way.connect(url)
        return ANSWER + own

    def _begin_trial(self, peer: Peer, url: bytes) -> bytes:
        """Fills a slab with random bytes, which the receiver is to read."""
        sending = self._sending.get(peer.id)
        if sending is None or sending.trial:
            return b""
        sending.connect(url)
        content = bytearray(os.urandom(slab_size(self.from_bytes)))  # A whole slab.
        staged = sending.stage(torch.frombuffer(content, dtype=torch.uint8), self._home.copier)
        sending.kept.append(staged.kept)
        sending.trial = _digest(content)
        return TRIAL + staged.content

    def _try(self, peer: Peer, content: bytes) -> bytes:
        """Reads the slab of a trial, and measures that; returns the digest of its bytes.

        The best of some reads counts: the first one connects, and others may be interrupted.
        """
        receiving = self._receiving.get(peer.id)
        if receiving is None:
            raise ProtocolError("a trial needs an offer before")
        entry = Entry(self.number, _slab_bytes_in(content), content)
        limit_s = min(self._trial_s, self._stall_s)
        durations_s: list[float] = []
        buffers: list[memoryview] = []
        for _ in range(_TRIAL_READS):
            buffers.clear()  # The slab is used again.
            began_s = time.perf_counter()
            buffers = self._read(peer, receiving, [entry], limit_s)
            durations_s.append(time.perf_counter() - began_s)
        rate = entry.size_bytes / min(durations_s)
        if rate < self._least_rate:
            raise TransportFailed(
                f"a trial ran at {rate / 1e9:.2f} GB/s, which sockets reach as well"
            )
        return TRIED + _digest(buffers[0])

    def _judge(self, peer: Peer, digest: bytes) -> bytes:
        sending = self._sending.get(peer.id)
        if sending is not None and sending.trial:
            if digest != sending.trial:
                raise TransportFailed(f"worker {peer.name!r} read other bytes than there were")
            with self._lock:
                sending.is_proven = not sending.failure
            if sending.is_proven:
                sending.kept.clear()  # The slab comes back.
                peer.ways.prove(self)
        return b""

    def _refused(self, peer: Peer, reason: bytes) -> bytes:
        raise TransportFailed(f"worker {peer.name!r} cannot: {reason.decode(errors='replace')}")

    def _reserve(self, peer: Peer, ways: _Ways) -> str:
        """Reserves a way for a peer; returns why there cannot be one."""
        with self._lock:
            if self._is_closed or peer.is_over or peer.id in ways:
                return "it has RDMA with this worker already, or shuts down"
            if len(self._sending) + len(self._receiving) >= self._way_limit:
                return f"it has RDMA with {self._way_limit} workers, and may have no more"
            ways[peer.id] = None
        return ""

    def _open(self, peer: Peer, ways: _Ways, pool: BufferPool) -> Way:
        """Opens this side's end of a reserved way; a backend may take a second to start."""
        if self._own_obstacle:  # A peer may ask nevertheless.
            raise TransportFailed(self._own_obstacle)
        way = Way(open_transport(), pool)
        with self._lock:
            if peer.id in ways:
                ways[peer.id] = way
                return way
        way.close(_CLOSE_LIMIT_S)
        raise TransportFailed("the peer is lost, or this worker shuts down")

    def _fail(self, peer: Peer, reason: str, *, is_sender: bool) -> None:
        """Gives a way up, for good."""
        ways = self._sending if is_sender else self._receiving
        with self._lock:
            way = ways.get(peer.id)
            if way is not None:
                way.failure = way.failure or reason
                way.is_proven = False
            elif not is_sender:
                ways.pop(peer.id, None)  # It could not be opened.
        if is_sender:
            peer.ways.give_up(self.name, reason)

    # Receiving

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        receiving = self._receiving.get(peer.id)
        if receiving is None:
            if peer.is_over:
                raise peer.lost_error()
            raise ProtocolError(f"worker {peer.name!r} sends by RDMA without a trial")
        try:
            return self._read(peer, receiving, entries, self._stall_s)
        except CannotGet as error:
            self._fail(peer, str(error), is_sender=False)
            raise TransportFailed(str(error)) from error

    def _read(
        self, peer: Peer, receiving: Way, entries: Sequence[Entry], limit_s: float
    ) -> list[memoryview]:
        if receiving.failure:
            raise TransportFailed(receiving.failure)
        buffers: list[memoryview] = []
        transfers: list[Transfer] = []
        try:
            for entry in entries:
                buffer, registration = receiving.lease(entry.size_bytes)
                buffers.append(buffer)
                transfers.append(receiving.read(entry, registration, limit_s))
            self._home.wait_for(peer, transfers, limit_s)
            for transfer in transfers:
                transfer.check()
        except BaseException:
            receiving.kept += buffers  # Transfers may go on, also one that has raised.
            raise
        return buffers

    # Housekeeping

    def tick(self, now_s: float) -> None:
        for way in list(self._sending.values()):
            if way is not None:
                way.pool.trim(self._home.idle_s)

    def lost(self, peer: Peer) -> None:
        """Ends the transports with a lost worker, as a task: that waits for their transfers."""
        with self._lock:
            found = self._sending.pop(peer.id, None), self._receiving.pop(peer.id, None)
            ways = [way for way in found if way is not None]
            self._ending += ways
        if ways:
            self._home.reactor.submit(self._end, ways)

    def _end(self, ways: Sequence[Way], _: object) -> None:
        with self._home.reactor.idling():
            _close(ways)
        with self._lock:
            self._ending = [way for way in self._ending if way not in ways]

    def close(self, limit_s: float) -> None:
        """Ends all transports: this worker shuts down."""
        with self._lock:
            self._is_closed = True
            found = *self._sending.values(), *self._receiving.values(), *self._ending
            self._sending.clear()
            self._receiving.clear()
        _close([way for way in found if way is not None])


def _digest(content: Buffer) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _close(ways: Sequence[Way]) -> None:
    deadline_s = time.monotonic() + _CLOSE_LIMIT_S
    for way in ways:
        way.close(max(deadline_s - time.monotonic(), 0.0))
