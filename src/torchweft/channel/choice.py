"""Determines the channels that work for one peer, and the channel of each buffer.

Both sides describe themselves when they connect, and exchange their shared memory. Each side then
tests on which channels it can *receive* from the other, and reports the result in a verdict. A side
sends on a channel once the peer's verdict confirms it: reading another process's memory may be
permitted in one direction only. If all other channels fail, the bytes follow the message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchweft import knobs
from torchweft.channel import cma, rdma
from torchweft.channel.cuda import find_driver
from torchweft.channel.shm.borrowed import Borrowed
from torchweft.channel.shm.kernel import peer_of
from torchweft.channel.shm.layout import attach
from torchweft.channel.shm.pool import Lender, make_pool
from torchweft.channel.table import CMA, CUDA_IPC, FETCHED, RDMA, SHM, STRIPED, ChannelKind
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.probe import Facts, read_facts

logger = logging.getLogger(__name__)

INLINE, STREAM = ChannelKind.INLINE, ChannelKind.STREAM

_PREFERENCE = (
    (SHM, knobs.SHM_FROM_BYTES),
    (CMA, knobs.CMA_FROM_BYTES),
    (RDMA, knobs.RDMA_FROM_BYTES),
    (STRIPED, knobs.STRIPED_FROM_BYTES),
)
"""The channels that need the peer's confirmation, best first, and their smallest buffer sizes."""

NO_CUDA = "there is no CUDA here"
"""The obstacle of processes without GPUs."""

_NOT_TRIED = "this side has not tried it"
UNTRIED = "no tensor has been large enough to try it"
"""The obstacle of a channel that both sides have and that a first tensor tries."""

_UNCONFIRMED = "the peer has not confirmed yet that it can receive this way"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Describes one side of a connection to the other.

    Attributes:
        facts: The process and its host.
        nonce_address: Address of its nonce in its memory; 0 if it offers none.
        nonce: The nonce, in hexadecimal digits.
        cma_obstacle: Why it cannot pull from any process; empty if it can.
        memory_nonce: The first bytes of its shared memory, in hexadecimal digits; empty if it
            offers none.
        cuda_obstacle: Why it cannot map device memory of any process; empty if it can.
        rdma_obstacle: Why it cannot read memory of any other host; empty if it may be able to.
    """

    facts: Facts
    nonce_address: int
    nonce: str
    cma_obstacle: str
    memory_nonce: str = ""
    cuda_obstacle: str = ""
    rdma_obstacle: str = ""

    def as_json(self) -> dict[str, object]:
        """Returns the capabilities as a dictionary that JSON can carry."""
        return {
            "facts": self.facts.as_json(),
            "nonce_address": self.nonce_address,
            "nonce": self.nonce,
            "cma_obstacle": self.cma_obstacle,
            "memory_nonce": self.memory_nonce,
            "cuda_obstacle": self.cuda_obstacle,
            "rdma_obstacle": self.rdma_obstacle,
        }

    @classmethod
    def from_json(cls, data: object) -> Capabilities:
        """Returns the capabilities that ``as_json`` wrote.

        Raises:
            ProtocolError: A field is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise ProtocolError(f"capabilities are a {type(data).__name__}, not an object")
        address = data.get("nonce_address")
        if not isinstance(address, int) or not 0 <= address < 1 << 64:
            raise ProtocolError(f"a peer's nonce lies at {address!r}, which is no address")
        names = ("nonce", "cma_obstacle", "memory_nonce", "cuda_obstacle", "rdma_obstacle")
        texts = [data.get(name) for name in names]
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a peer's nonces and its obstacles are to be texts")
        facts = Facts.from_json(data.get("facts"))
        return cls(facts, address, *map(str, texts))


def describe(nonce: cma.Nonce | None) -> Capabilities:
    """Describes this process; ``nonce`` is None if peers may not read its memory."""
    others = {"cuda_obstacle": _own_cuda_obstacle(), "rdma_obstacle": rdma.own_obstacle()}
    if nonce is None:
        return Capabilities(read_facts(), 0, "", "switched off", **others)
    address, digits = nonce.address, nonce.value.hex()
    return Capabilities(read_facts(), address, digits, cma.unavailable, **others)


class Channels:
    """The channels to and from one peer. Thread-safe.

    Attributes:
        lender: Lends this side's shared memory to the peer; None while that channel is not usable.
        copies_devices: Whether the peer can copy out of this side's device memory.
        inline_limit_bytes: The largest buffer that travels within its message.

    Args:
        peer: Name of the peer, for the log.
        pid: The peer's process id.
        receive_obstacles: For every channel that has to be tested, why nothing can be received on
            it from the peer; empty if it works.
    """

    def __init__(
        self, peer: str, pid: int, receive_obstacles: Mapping[ChannelKind, str] | None = None
    ) -> None:
        self._peer = peer
        self._pid = pid
        self.inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self._from_bytes = {kind: knob.get() for kind, knob in _PREFERENCE}
        self._receive_obstacles = dict(receive_obstacles or {})
        self._send_obstacles = dict.fromkeys((*self._from_bytes, CUDA_IPC), _UNCONFIRMED)
        self._disabled: set[ChannelKind] = set()
        self._proven: set[ChannelKind] = set()
        self._usable: tuple[tuple[int, ChannelKind], ...] = ()
        self._lender: Lender | None = None
        self._borrowed: Borrowed | None = None
        self.lender: Lender | None = None
        self.copies_devices = False
        self._is_lost = self._was_lost = False
        self._lock = threading.RLock()

    def channel_for(self, size_bytes: int) -> ChannelKind:
        """Returns the channel for a buffer of that size to the peer now."""
        if size_bytes <= self.inline_limit_bytes:
            return INLINE
        for from_bytes, kind in self._usable:
            if size_bytes >= from_bytes:
                return kind
        return STREAM

    def next_best(self, kind: ChannelKind, size_bytes: int) -> ChannelKind:
        """Returns the channel for a buffer whose best channel, ``kind``, has no room for it now."""
        is_past = False
        for from_bytes, other in self._usable:
            if is_past and size_bytes >= from_bytes:
                return other
            is_past = is_past or other == kind
        return STREAM

    def source_pid(self) -> int:
        """Returns the id of the process to pull from, proven to be the peer.

        Raises:
            ProtocolError: It is not proven; the peer was told so but still asks to be pulled from.
        """
        obstacle = self._receive_obstacles.get(CMA, _NOT_TRIED)
        if obstacle:
            raise ProtocolError(f"{self._peer} wants its memory to be read, but {obstacle}")
        return self._pid

    def lend_by(self, lender: Lender) -> None:
        """Lends through ``lender`` once the peer confirms that it has mapped the memory."""
        self._lender = lender

    def map_memory(self, descriptor: int | None, nonce: str) -> None:
        """Maps the peer's shared memory, and records the result for the verdict.

        Args:
            descriptor: The descriptor that the peer handed over, which the caller closes; None if
                the peer handed over none.
            nonce: The first bytes of the memory according to the peer, in hexadecimal digits.
        """
        if descriptor is None:
            self._receive_obstacles[SHM] = "the peer has handed over no shared memory"
            return
        try:
            area = attach(descriptor, bytes.fromhex(nonce))
        except (OSError, ValueError) as error:
            self._receive_obstacles[SHM] = f"the peer's shared memory cannot be mapped: {error}"
        else:
            self._borrowed = Borrowed(area, self._peer)
            self._receive_obstacles[SHM] = ""

    def borrowed(self) -> Borrowed:
        """Returns the peer's shared memory.

        Raises:
            ProtocolError: It is not mapped; the peer was told so but still lends it.
        """
        if self._borrowed is None:
            obstacle = self._receive_obstacles.get(SHM, _NOT_TRIED) or "it is lost"
            raise ProtocolError(f"{self._peer} lends shared memory, but {obstacle}")
        return self._borrowed

    def tidy(self) -> None:
        """Drops state that is useful only while tensors arrive often.

        The memory of a lost peer, too: what arrived before the loss has been read by then.
        """
        if self._was_lost:
            self._borrowed = None  # Tensors in it keep it mapped.
        self._was_lost = self._is_lost
        if self._borrowed is not None:
            self._borrowed.forget_pages()

    def lose(self) -> None:
        """Takes back the memory lent to the peer, which is lost, as soon as that is safe."""
        self._is_lost = True
        lender = self._lender
        if lender is not None:
            lender.lose()

    def verdict(self) -> dict[str, str]:
        """Returns for the peer why each optional channel fails here; empty if it works."""
        return {kind.name.lower(): text for kind, text in self._receive_obstacles.items()}

    def confirm(self, verdict: object) -> None:
        """Applies the peer's verdict: sends from now on by the channels that work there.

        A channel missing in the verdict stays as it is; a channel unknown to this side is ignored.

        Raises:
            ProtocolError: ``verdict`` is not a verdict.
        """
        if not isinstance(verdict, dict) or not all(isinstance(v, str) for v in verdict.values()):
            raise ProtocolError(f"a peer answers {verdict!r} to what it can receive")
        with self._lock:
            for kind in self._send_obstacles:
                if kind not in self._disabled and kind.name.lower() in verdict:
                    self._send_obstacles[kind] = verdict[kind.name.lower()]
            if not self._send_obstacles[RDMA] and RDMA not in self._proven:
                self._send_obstacles[RDMA] = UNTRIED
            self._update_usable()

    def prove(self, kind: ChannelKind) -> None:
        """Records that the peer has received by a channel that a first tensor tries."""
        with self._lock:
            if kind not in self._disabled:
                self._proven.add(kind)
                self._send_obstacles[kind] = ""

    def disable(self, kind: ChannelKind, reason: str) -> None:
        """Permanently stops sending to the peer by one channel, and logs that once.

        Raises:
            ConfigurationError: The channel cannot be disabled, because others fall back to it.
        """
        if kind not in FETCHED:
            raise ConfigurationError(f"{kind.name} cannot be disabled: the others fall back to it")
        with self._lock:
            if kind in self._disabled:
                return
            self._disabled.add(kind)
            self._send_obstacles[kind] = reason
            self._update_usable()
            rest = [other.name.lower() for _, other in self._usable] or [STREAM.name.lower()]
        if kind == CUDA_IPC:
            rest = ["the host's memory"]
        logger.warning(
            "tensors to %s no longer travel by %s, but by %s: %s",
            self._peer,
            kind.name.lower(),
            " or ".join(rest),
            reason,
        )

    def obstacles(self) -> dict[ChannelKind, str]:
        """Returns for every channel why it is not used for sending; empty if it is."""
        return {INLINE: "", STREAM: "", **self._send_obstacles}

    def usable(self) -> tuple[tuple[int, ChannelKind], ...]:
        """Returns the channels to the peer, best first, each with its smallest buffer size."""
        return self._usable

    def _update_usable(self) -> None:
        # One assignment, so that senders need no lock.
        self._usable = tuple(
            (from_bytes, kind)
            for kind, from_bytes in self._from_bytes.items()
            if self._send_obstacles[kind] in ("", UNTRIED)
        )
        self.lender = None if self._send_obstacles[SHM] else self._lender
        self.copies_devices = not self._send_obstacles[CUDA_IPC]


def choose(ours: Capabilities, theirs: Capabilities, peer: str) -> Channels:
    """Tests by which channels this process can receive from a peer.

    Args:
        ours: The capabilities that ``describe`` returned here.
        theirs: The capabilities that it returned at the peer.
        peer: Name of the peer, for the log.
    """
    obstacles = {CMA: _cma_obstacle(ours, theirs), STRIPED: ""}
    obstacles[CUDA_IPC] = _cuda_obstacle(ours, theirs)
    obstacles[RDMA] = _rdma_obstacle(ours, theirs)
    return Channels(peer, theirs.facts.pid, obstacles)


def _own_cuda_obstacle() -> str:
    """Returns why this process shares device memory with no other; does not start CUDA."""
    if not knobs.CUDA_IPC.get():
        return f"{knobs.CUDA_IPC.variable}=0 is set"
    return "" if find_driver() is not None else NO_CUDA


def _cuda_obstacle(ours: Capabilities, theirs: Capabilities) -> str:
    """Returns why this process cannot copy out of the peer's device memory.

    More is found out by the first tensor: a trial would start CUDA in processes that need none.
    """
    here, there = ours.facts, theirs.facts
    if ours.cuda_obstacle:
        return ours.cuda_obstacle
    if theirs.cuda_obstacle:
        return f"of the peer: {theirs.cuda_obstacle}"
    if not here.boot_id or here.boot_id != there.boot_id:
        return f"the peer is on another host ({there.hostname})"
    if here.pid == there.pid and here.pid_namespace == there.pid_namespace:
        return "the peer is this process"
    return ""


def _rdma_obstacle(ours: Capabilities, theirs: Capabilities) -> str:
    """Returns why this process cannot read the peer's memory by RDMA, as far as is known yet."""
    here, there = ours.facts, theirs.facts
    if ours.rdma_obstacle:
        return ours.rdma_obstacle
    if theirs.rdma_obstacle:
        return f"of the peer: {theirs.rdma_obstacle}"
    if here.boot_id and here.boot_id == there.boot_id and not rdma.is_forced():
        return "the peer is on this host"
    return ""


def _cma_obstacle(ours: Capabilities, theirs: Capabilities) -> str:
    """Returns why this process cannot pull from the peer, in the user's terms."""
    here, there = ours.facts, theirs.facts
    if ours.cma_obstacle:
        return ours.cma_obstacle
    if not theirs.nonce_address:
        return "the peer does not offer its memory"
    if not here.boot_id or here.boot_id != there.boot_id:
        return f"the peer is on another host ({there.hostname})"
    if not here.pid_namespace or here.pid_namespace != there.pid_namespace:
        return "the peer is in another process namespace, as in another container"
    if here.uid != there.uid:
        return f"the peer runs as user {there.uid}, this process as user {here.uid}"
    try:
        nonce = bytes.fromhex(theirs.nonce)
    except ValueError:
        return "the peer's nonce is malformed"
    return cma.find_obstacle(there.pid, theirs.nonce_address, nonce)


class MemoryExchange:
    """Hands this worker's shared memory to peers as they connect, and maps the memory of peers.

    A descriptor travels over Unix sockets only, behind a greeting that answers one with the secret
    of the run: no other process gets it. A peer in another container gets it as well, if it reaches
    this worker by such a socket.

    Attributes:
        pool: This worker's shared memory; None if there is none.
    """

    def __init__(self) -> None:
        self.pool = make_pool(knobs.SHM_LIMIT_BYTES.get())

    @property
    def nonce(self) -> str:
        """The nonce at the start of the memory, in hexadecimal digits; empty without memory."""
        return "" if self.pool is None else self.pool.area.nonce.hex()

    @contextlib.contextmanager
    def descriptor_for(self, connection: socket.socket) -> Iterator[int | None]:
        """Yields the descriptor to send with the next greeting; None if there is none to send."""
        descriptor = None
        if self.pool is not None and connection.family == socket.AF_UNIX:
            descriptor = self.pool.duplicate()
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def lend(self, channels: Channels, connection: socket.socket) -> None:
        """Lends to the connected peer, once that peer confirms that it can borrow."""
        if self.pool is not None and connection.family == socket.AF_UNIX:
            channels.lend_by(Lender(self.pool, peer_of(connection)))

    def close(self) -> None:
        """Stops lending; memory in use stays."""
        if self.pool is not None:
            self.pool.close()


def map_memory(channels: Channels, descriptors: list[int], nonce: str) -> None:
    """Maps the memory that came with a peer's greeting, if any, and closes the descriptor."""
    try:
        channels.map_memory(descriptors[0] if descriptors else None, nonce)
    finally:
        close_all(descriptors)


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors that came with a greeting."""
    while descriptors:
        os.close(descriptors.pop())
