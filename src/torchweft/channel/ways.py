"""One peer as the sender of tensors sees it: the channels that work, and what it has not got yet.

Both sides describe themselves when they connect. Each side then tests on which channels it can
*receive* from the other, and reports the result in a verdict. A side sends on a channel once the
peer's verdict confirms it: what works in one direction may fail in the other. A channel that fails
at run time is given up for that peer and direction, with one warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torchweft import knobs
from torchweft.channel.channel import Channel, Handle
from torchweft.channel.channel import Peer as ChannelPeer
from torchweft.errors import ProtocolError
from torchweft.free_threading import shared_count

logger = logging.getLogger(__name__)

INLINE, STREAM = "inline", "stream"
"""Names for reports: small and large buffers that follow their message."""

UNTRIED = "no tensor has been large enough to try it"
"""The obstacle of a channel that both sides have and that a first tensor tries."""
_UNCONFIRMED = "the peer has not confirmed yet that it can receive this way"


class HeldStatistics(NamedTuple):
    """The buffers that a peer has not reported on yet."""

    message_count: int
    size_bytes: int


class Held:
    """Keeps the handles of messages to one peer until it reports that it has their buffers.

    Nothing is copied: writing to the memory before then may change the data that the peer gets, as
    with any send that has not completed. Thread-safe.
    """

    def __init__(self) -> None:
        self._tokens = shared_count(1)
        self._lock = threading.RLock()
        self._held: dict[int, list[tuple[Channel, Handle]]] = {}
        self._is_closed = False

    def token(self) -> int:
        """Returns the token of a new message."""
        return next(self._tokens)

    def hold(self, token: int, handles: list[tuple[Channel, Handle]]) -> None:
        """Keeps the handles of a message until ``release``."""
        with self._lock:
            if not self._is_closed:
                self._held[token] = handles

    def take(self, token: int, channel: Channel) -> list[Handle]:
        """Removes and returns the kept handles of a message that go over one channel, in order."""
        with self._lock:
            held = self._held.get(token, [])
            taken = [handle for of, handle in held if of is channel]
            held[:] = [each for each in held if each[0] is not channel]
        return taken

    def release(self, token: int, *, is_sent: bool = True) -> None:
        """Lets go of a message; does nothing the second time.

        Args:
            token: The message.
            is_sent: Whether the peer has the message, and so has read its handles.
        """
        with self._lock:
            released = self._held.pop(token, ())
        if is_sent:
            for _, handle in released:
                handle.acknowledge()

    def close(self) -> None:
        """Lets go of everything, now and in future: the peer will get no more."""
        with self._lock:
            self._is_closed = True
            # Dropped outside the lock: the end of a tensor may run any code.
            dropped, self._held = self._held, {}
        dropped.clear()

    def statistics(self) -> HeldStatistics:
        """Returns how much is held now."""
        with self._lock:
            held = [handle.size_bytes for each in self._held.values() for _, handle in each]
            return HeldStatistics(len(self._held), sum(held))


class Ways:
    """The channels to and from one peer. Thread-safe.

    Attributes:
        usable: The channels over which buffers are sent to the peer, best first.
        inline_limit_bytes: The largest buffer that counts as part of its message.

    Args:
        peer: Name of the peer, for the log.
        channels: All channels of this worker.
    """

    def __init__(self, peer: str, channels: Sequence[Channel] = ()) -> None:
        self._peer = peer
        self._channels = channels
        self.inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self.usable: tuple[Channel, ...] = ()
        self._receive_obstacles: dict[str, str] = {}
        self._send_obstacles = {each.name: _UNCONFIRMED for each in channels}
        self._given_up: set[str] = set()
        self._proven: set[str] = set()
        self._lock = threading.RLock()

    def first_for(self, size_bytes: int) -> str:
        """Returns the name of the channel that is offered a buffer of the host of that size."""
        if size_bytes <= self.inline_limit_bytes:
            return INLINE
        fitting = (name for name, least_bytes in self.sizes() if size_bytes >= least_bytes)
        return next(fitting, STREAM)

    def sizes(self) -> list[tuple[str, int]]:
        """Returns the channels for the host's memory, best first, with their smallest buffers."""
        return [(each.name, each.from_bytes) for each in self.usable if not each.is_for_devices]

    def accepted(self, obstacles: Mapping[str, str]) -> None:
        """Records for the verdict why nothing can be received from the peer over channels."""
        self._receive_obstacles.update(obstacles)

    def verdict(self) -> dict[str, str]:
        """Returns for the peer why each channel fails here; empty if it works."""
        return dict(self._receive_obstacles)

    def confirm(self, verdict: object) -> None:
        """Applies the peer's verdict: sends from now on by the channels that work there.

        A channel missing in the verdict stays as it is; a channel unknown to this side is ignored.

        Raises:
            ProtocolError: ``verdict`` is not a verdict.
        """
        if not isinstance(verdict, dict) or not all(isinstance(v, str) for v in verdict.values()):
            raise ProtocolError(f"a peer answers {verdict!r} to what it can receive")
        with self._lock:
            for name in self._send_obstacles:
                if name not in self._given_up and name in verdict:
                    self._send_obstacles[name] = verdict[name]
            self._update()

    def prove(self, channel: Channel) -> None:
        """Records that the peer has received over a channel that a first tensor tries."""
        self._proven.add(channel.name)

    def give_up(self, name: str, reason: str) -> None:
        """Permanently stops sending to the peer over one channel, and logs that once."""
        with self._lock:
            if name in self._given_up or name not in self._send_obstacles:
                return
            self._given_up.add(name)
            self._send_obstacles[name] = reason
            is_for_devices = any(each.name == name and each.is_for_devices for each in self.usable)
            self._update()
            rest = [other for other, _ in self.sizes()] or [STREAM]
        if is_for_devices:
            rest = ["the host's memory"]
        logger.warning(
            "tensors to worker %r no longer travel by %s, but by %s: %s",
            self._peer,
            name,
            " or ".join(rest),
            reason,
        )

    def obstacles(self) -> dict[str, str]:
        """Returns for every channel why it is not used for sending; empty if it is."""
        untried = [each.name for each in self.usable if each.is_tried]
        untried = [name for name in untried if name not in self._proven]
        return {INLINE: "", STREAM: ""} | self._send_obstacles | dict.fromkeys(untried, UNTRIED)

    def _update(self) -> None:
        # One assignment, so that senders need no lock.
        self.usable = tuple(
            [each for each in self._channels if not self._send_obstacles[each.name]]
        )


class Peer(ChannelPeer, Protocol):
    """The other worker, as ``Channels`` knows it."""

    ways: Ways
    held: Held
