"""Which ways tensor memory can take to one peer, and which of them a buffer takes.

Both sides describe themselves when they connect. Each then finds out what it can *receive* from
the other, by trying, and says so in a verdict. A way is used for sending from the moment the
peer's verdict says that it works there: reading another process's memory may be permitted in one
direction and not in the other. Whatever else fails, bytes can always follow the message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from torchweft import knobs
from torchweft.channel import cma
from torchweft.channel.capabilities import Capabilities
from torchweft.channel.shm.borrowed import Borrowed
from torchweft.channel.shm.layout import attach
from torchweft.channel.shm.lending import Lender
from torchweft.channel.table import FETCHED, ChannelKind
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.probe import read_facts

logger = logging.getLogger(__name__)

INLINE, STREAM = ChannelKind.INLINE, ChannelKind.STREAM
CMA, SHM = ChannelKind.CMA, ChannelKind.SHM
STRIPED = ChannelKind.STRIPED

_PREFERENCE = (
    (SHM, knobs.SHM_FROM_BYTES),
    (CMA, knobs.CMA_FROM_BYTES),
    (STRIPED, knobs.STRIPED_FROM_BYTES),
)
"""The ways that need the peer's confirmation, best first, and the sizes that they are good for."""

_NOT_TRIED = "this side has not tried it"
_UNCONFIRMED = "the peer has not confirmed yet that it can receive this way"


def describe(nonce: cma.Nonce | None) -> Capabilities:
    """Describes this process; ``nonce`` is None where its memory is not to be read."""
    if nonce is None:
        return Capabilities(read_facts(), 0, "", "switched off")
    return Capabilities(read_facts(), nonce.address, nonce.value.hex(), cma.unavailable)


class Channels:
    """The ways to and from one peer. Thread-safe.

    Attributes:
        lender: Lends to the peer what this side has in shared memory; None where that way is
            not usable now.

    Args:
        peer: Name of the peer, for the log.
        pid: The peer's process.
        receive_obstacles: For every way that has to be tried, why nothing can be received from
            the peer that way; empty if it can.
    """

    def __init__(
        self, peer: str, pid: int, receive_obstacles: Mapping[ChannelKind, str] | None = None
    ) -> None:
        self._peer = peer
        self._pid = pid
        self._inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self._from_bytes = {kind: knob.get() for kind, knob in _PREFERENCE}
        self._receive_obstacles = dict(receive_obstacles or {})
        self._send_obstacles = dict.fromkeys(self._from_bytes, _UNCONFIRMED)
        self._disabled: set[ChannelKind] = set()
        self._usable: tuple[tuple[int, ChannelKind], ...] = ()
        self._lender: Lender | None = None
        self._borrowed: Borrowed | None = None
        self.lender: Lender | None = None
        self._lock = threading.Lock()

    def channel_for(self, size_bytes: int) -> ChannelKind:
        """Returns the way that a buffer of that size takes to the peer now."""
        if size_bytes <= self._inline_limit_bytes:
            return INLINE
        for from_bytes, kind in self._usable:
            if size_bytes >= from_bytes:
                return kind
        return STREAM

    def next_best(self, kind: ChannelKind, size_bytes: int) -> ChannelKind:
        """Returns the way for a buffer whose best way, ``kind``, has no room for it now."""
        is_past = False
        for from_bytes, other in self._usable:
            if is_past and size_bytes >= from_bytes:
                return other
            is_past = is_past or other == kind
        return STREAM

    def source_pid(self) -> int:
        """Returns the process to pull from, once it is proven to be the peer.

        Raises:
            ProtocolError: It is not; a peer that was told so wants to be pulled from nevertheless.
        """
        obstacle = self._receive_obstacles.get(CMA, _NOT_TRIED)
        if obstacle:
            raise ProtocolError(f"{self._peer} wants its memory to be read, but {obstacle}")
        return self._pid

    def lend_by(self, lender: Lender) -> None:
        """Lends by ``lender`` from when the peer confirms that it has mapped the memory."""
        self._lender = lender

    def map_memory(self, descriptor: int | None, nonce: str) -> None:
        """Maps the peer's shared memory, and makes the verdict of it.

        Args:
            descriptor: What the peer handed over; it is the caller's to close. None for nothing.
            nonce: What the peer says that its memory begins with, in hexadecimal digits.
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
            ProtocolError: It is not mapped; a peer that was told so lends it nevertheless.
        """
        if self._borrowed is None:
            obstacle = self._receive_obstacles.get(SHM, _NOT_TRIED)
            raise ProtocolError(f"{self._peer} lends shared memory, but {obstacle}")
        return self._borrowed

    def tidy(self) -> None:
        """Lets go of what is of use only while tensors come often."""
        if self._borrowed is not None:
            self._borrowed.forget_pages()

    def lose(self) -> None:
        """Takes back what was lent to the peer, which is lost, as soon as that is safe."""
        lender = self._lender
        if lender is not None:
            lender.lose()

    def verdict(self) -> dict[str, str]:
        """Returns, for the peer, what keeps each optional way of its from being received here."""
        return {kind.name.lower(): text for kind, text in self._receive_obstacles.items()}

    def confirm(self, verdict: object) -> None:
        """Takes the peer's verdict, and uses from now on what works there.

        A way that it says nothing of stays as it is; one that it knows and this side does not is
        none of this side's business.

        Raises:
            ProtocolError: It is no verdict.
        """
        if not isinstance(verdict, dict) or not all(isinstance(v, str) for v in verdict.values()):
            raise ProtocolError(f"a peer answers {verdict!r} to what it can receive")
        with self._lock:
            for kind in self._send_obstacles:
                if kind not in self._disabled and kind.name.lower() in verdict:
                    self._send_obstacles[kind] = verdict[kind.name.lower()]
            self._update_usable()

    def disable(self, kind: ChannelKind, reason: str) -> None:
        """Stops sending to the peer that way, for good, and says so once in the log.

        Raises:
            ConfigurationError: The way is one that cannot be done without.
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
        logger.warning(
            "tensors to %s no longer travel by %s, but by %s: %s",
            self._peer,
            kind.name.lower(),
            " or ".join(rest),
            reason,
        )

    def obstacles(self) -> dict[ChannelKind, str]:
        """Returns for every way why it is not used for sending; empty if it is."""
        return {INLINE: "", STREAM: "", **self._send_obstacles}

    def _update_usable(self) -> None:
        # One assignment, so that senders need no lock.
        self._usable = tuple(
            (from_bytes, kind)
            for kind, from_bytes in self._from_bytes.items()
            if not self._send_obstacles[kind]
        )
        self.lender = None if self._send_obstacles[SHM] else self._lender


def choose(ours: Capabilities, theirs: Capabilities, peer: str) -> Channels:
    """Finds out, by trying, which ways lead from a peer to this process.

    Args:
        ours: What ``describe`` said here.
        theirs: What it said at the peer.
        peer: Name of the peer, for the log.
    """
    return Channels(peer, theirs.facts.pid, {CMA: _cma_obstacle(ours, theirs), STRIPED: ""})


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
