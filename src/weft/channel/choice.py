"""Which ways tensor memory can take to one peer, and which of them a buffer takes.

Both sides describe themselves when they connect. Each then finds out what it can *receive* from
the other, by trying, and says so in a verdict. A way is used for sending from the moment the
peer's verdict says that it works there: reading another process's memory may be permitted in one
direction and not in the other. Whatever else fails, bytes can always follow the message.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from weft import knobs
from weft.channel import cma
from weft.channel.table import ChannelKind
from weft.errors import ConfigurationError, ProtocolError
from weft.probe import Facts, read_facts

logger = logging.getLogger(__name__)

INLINE, STREAM, CMA = ChannelKind.INLINE, ChannelKind.STREAM, ChannelKind.CMA

_UNCONFIRMED = "the peer has not confirmed yet that it can read this process's memory"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one side of a connection tells the other about itself.

    Attributes:
        facts: The process and its host.
        nonce_address: Where its nonce lies in its memory; 0 if it offers none.
        nonce: The nonce, in hexadecimal digits.
        cma_obstacle: Why it can pull from nobody; empty if it can.
    """

    facts: Facts
    nonce_address: int
    nonce: str
    cma_obstacle: str

    def as_json(self) -> dict[str, object]:
        """Returns the capabilities as a dictionary that JSON can carry."""
        return {
            "facts": self.facts.as_json(),
            "nonce_address": self.nonce_address,
            "nonce": self.nonce,
            "cma_obstacle": self.cma_obstacle,
        }

    @classmethod
    def from_json(cls, data: object) -> Capabilities:
        """Reads what ``as_json`` wrote.

        Raises:
            ProtocolError: Something is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise ProtocolError(f"capabilities are a {type(data).__name__}, not an object")
        address, nonce = data.get("nonce_address"), data.get("nonce")
        obstacle = data.get("cma_obstacle")
        if not isinstance(address, int) or not 0 <= address < 1 << 64:
            raise ProtocolError(f"a peer's nonce lies at {address!r}, which is no address")
        if not isinstance(nonce, str) or not isinstance(obstacle, str):
            raise ProtocolError("a peer's nonce and its obstacle are to be texts")
        return cls(Facts.from_json(data.get("facts")), address, nonce, obstacle)


def describe(nonce: cma.Nonce | None) -> Capabilities:
    """Describes this process; ``nonce`` is None where its memory is not to be read."""
    if nonce is None:
        return Capabilities(read_facts(), 0, "", "switched off")
    return Capabilities(read_facts(), nonce.address, nonce.value.hex(), cma.unavailable)


class Channels:
    """The ways to one peer. Thread-safe.

    Args:
        peer: Name of the peer, for the log.
        pid: The peer's process.
        receive_obstacle: Why nothing can be pulled from the peer; empty if it can.
    """

    def __init__(self, peer: str, pid: int, receive_obstacle: str) -> None:
        self._peer = peer
        self._pid = pid
        self._inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self._cma_from_bytes = knobs.CMA_FROM_BYTES.get()
        self._receive_obstacle = receive_obstacle
        self._lock = threading.Lock()
        self._was_disabled = False
        self._send_obstacle = _UNCONFIRMED
        self._largest = STREAM

    def channel_for(self, size_bytes: int) -> ChannelKind:
        """Returns the way that a buffer of that size takes to the peer now."""
        if size_bytes <= self._inline_limit_bytes:
            return INLINE
        return STREAM if size_bytes < self._cma_from_bytes else self._largest

    def source_pid(self) -> int:
        """Returns the process to pull from, once it is proven to be the peer.

        Raises:
            ProtocolError: It is not; a peer that was told so wants to be pulled from nevertheless.
        """
        if self._receive_obstacle:
            raise ProtocolError(
                f"{self._peer} wants its memory to be read, but {self._receive_obstacle}"
            )
        return self._pid

    def verdict(self) -> dict[str, str]:
        """Returns, for the peer, what keeps each optional way of its from being received here."""
        return {CMA.name.lower(): self._receive_obstacle}

    def confirm(self, verdict: object) -> None:
        """Takes the peer's verdict, and uses from now on what works there.

        Raises:
            ProtocolError: It is no verdict.
        """
        obstacle = verdict.get(CMA.name.lower()) if isinstance(verdict, dict) else None
        if not isinstance(obstacle, str):
            raise ProtocolError(f"a peer answers {verdict!r} to what it can receive")
        with self._lock:
            if not self._was_disabled:
                self._send_obstacle = obstacle
                self._largest = STREAM if obstacle else CMA

    def disable(self, kind: ChannelKind, reason: str) -> None:
        """Stops sending to the peer that way, for good, and says so once in the log.

        Raises:
            ConfigurationError: The way is one that cannot be done without.
        """
        if kind != CMA:
            raise ConfigurationError(f"{kind.name} cannot be disabled: the others fall back to it")
        with self._lock:
            if self._was_disabled:
                return
            self._was_disabled = True
            self._send_obstacle = reason
            self._largest = STREAM
        logger.warning(
            "tensors to %s no longer travel by %s, but by %s: %s",
            self._peer,
            kind.name.lower(),
            STREAM.name.lower(),
            reason,
        )

    def obstacles(self) -> dict[ChannelKind, str]:
        """Returns for every way why it is not used for sending; empty if it is."""
        return {INLINE: "", STREAM: "", CMA: self._send_obstacle}


def choose(ours: Capabilities, theirs: Capabilities, peer: str) -> Channels:
    """Finds out, by trying, which ways lead from a peer to this process.

    Args:
        ours: What ``describe`` said here.
        theirs: What it said at the peer.
        peer: Name of the peer, for the log.
    """
    return Channels(peer, theirs.facts.pid, _cma_obstacle(ours, theirs))


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
