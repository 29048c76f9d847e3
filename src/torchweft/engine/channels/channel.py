"""The interface between the messages of a worker and the channels that move their tensors.

A channel is one way for the memory of tensors between two processes. It is one module with one
subclass of ``Channel``, and one line in the list of ``channels.channels``. A message lists for each
buffer the number of its channel and a *handle*, the bytes by which the channel's other end finds
the buffer.

Rules for a channel:

- ``put`` never fails because of the channel: a buffer that finds no room is not taken, and the next
  channel of the list is offered it. So a rule such as "not if a better channel works" is the order
  of the list.
- ``get`` may fail, with ``CannotGet``. Then the bytes are asked for behind the message, whatever
  the channel. ``Handle.memory`` supplies them at the sender.
- The sender keeps the handles of a message until the receiver reports that it has the message's
  buffers, or will not read them. A channel whose buffers come back otherwise sets ``is_held`` to
  False.
- All methods may be called by several threads at once. ``put``, ``get`` and ``accept`` may block.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.device_copies import HostCopies, PageLocks
from torchweft.engine.channels.memory import BufferPool, Copier
from torchweft.engine.protocol.observing import VALUE, Wait
from torchweft.engine.threads.reactor import Reactor, Waiting
from torchweft.engine.wire.frames import Buffer as Bytes
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError, WeftError
from torchweft.free_threading import shared_count
from torchweft.probe import Facts

_log = logging.getLogger("torchweft")

Received = Bytes | Tensor
Copies = HostCopies | None

_LOOKS_S = 500e-6
"""Seconds a thread looks before it sleeps: a GPU that processes share takes 200 us to change."""
_LONGEST_SLEEP_S = 1e-3


class CannotGet(WeftError, OSError):
    """A buffer does not arrive over its channel; its bytes are to follow the message instead.

    Attributes:
        is_lasting: Whether the sender should stop using the channel to this worker.
    """

    is_lasting = True


class NotInTime(CannotGet):
    """A buffer does not arrive over its channel this time."""

    is_lasting = False


class Peer(Protocol):
    """The other worker, as channels know it.

    Attributes:
        id: Names its life.
        name: Its name.
        kept: What a channel keeps of it, by the channel's name: it goes with the peer.
        ways: The channels to and from it.
        held: What is sent to it.
        moved: The bytes of tensors that do not go over the link, by ``"sent shm"`` and the like.
    """

    id: int
    name: str
    is_self: bool
    kept: dict[str, Any]
    ways: Ways
    held: Held
    moved: Counter[str]

    @property
    def is_over(self) -> bool:
        """Whether the peer is lost, or has left."""

    def lost_error(self) -> WeftError:
        """Returns the error for a wait that the peer's loss ends."""


class Handle:
    """One buffer of a message that is sent over a channel.

    Attributes:
        content: The handle's bytes in the message.
        size_bytes: Size of the buffer.
        kept: The memory that the receiver gets it from, if that must stay meanwhile.
    """

    __slots__ = ("content", "kept", "size_bytes")

    is_slow: ClassVar[bool] = False
    """Whether ``memory`` may block."""
    is_shared: ClassVar[bool] = False
    """Whether nothing is copied: the user shares the memory with the receiver."""

    def __init__(self, content: bytes, size_bytes: int, kept: Any = None) -> None:
        self.content = content
        self.size_bytes = size_bytes
        self.kept = kept

    def memory(self) -> memoryview:
        """Returns the bytes, for a receiver that could not get them over the channel."""
        memory: memoryview = self.kept
        return memory

    def take_back(self) -> None:
        """Notes that the message will not be sent."""


class Held:
    """Keeps the handles of messages to one peer until it reports that it has their buffers.

    Nothing is copied: writing to the memory before then may change the data that the peer gets, as
    with any send that has not completed. Thread-safe.

    Attributes:
        tokens: Counts the messages; ``next`` returns the token of a new one.
    """

    def __init__(self) -> None:
        self.tokens = shared_count(1)
        self._lock = threading.RLock()
        self._held: dict[int, list[tuple[Channel, Handle]]] = {}
        self._is_closed = False

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

    def release(self, token: int) -> None:
        """Lets go of a message; does nothing the second time."""
        with self._lock:
            released = self._held.pop(token, None)
        del released  # Outside the lock: the end of a tensor may run any code.

    def close(self) -> None:
        """Lets go of everything, now and in future: the peer will get no more."""
        with self._lock:
            self._is_closed = True
            # Dropped outside the lock: the end of a tensor may run any code.
            dropped, self._held = self._held, {}
        dropped.clear()


class Entry(NamedTuple):
    """One buffer of a received message.

    Attributes:
        channel: Number of its channel.
        size_bytes: Its size.
        content: The handle's bytes; empty if the buffer follows the message.
        device: The device of its tensor here, for channels between devices.
    """

    channel: int
    size_bytes: int
    content: bytes = b""
    device: torch.device | None = None


class Meeting(NamedTuple):
    """What a channel knows when two workers connect.

    Attributes:
        here: This process.
        there: The peer's process.
        told: What ``describe`` returned at the peer.
        connection: The connection to it.
        descriptor: The descriptor that the peer has handed over, which the caller closes.
    """

    here: Facts
    there: Facts
    told: Mapping[str, Any]
    connection: socket.socket | None = None
    descriptor: int | None = None

    @property
    def is_one_host(self) -> bool:
        """Whether both processes are for certain on one host."""
        return bool(self.here.boot_id) and self.here.boot_id == self.there.boot_id

    def obstacle(self, own: str) -> str:
        """Returns this side's reason not to use the channel, or that of the peer."""
        theirs = self.text("obstacle")
        return own or (f"of the peer: {theirs}" if theirs else "")

    def text(self, name: str) -> str:
        """Returns a text that the peer told; raises ProtocolError if it is none."""
        text = self.told.get(name, "")
        if not isinstance(text, str):
            raise ProtocolError(f"a peer tells {text!r} as {name} of a channel, which is no text")
        return text


@dataclass(frozen=True)
class Home:
    """What a channel needs of its worker.

    Attributes:
        name: Name of the worker.
        reactor: Runs tasks; counts the threads that wait.
        pool: Leases memory to receive into.
        page_locks: Counts page-locked memory, and has the calls of CUDA.
        copier: Copies large memory.
        idle_s: For how long unused memory is kept.
        peers: The other workers, by id.
        post: Sends a control message: its kind and its content. Never blocks.
        on: Registers the handler for a kind of control message. The handler runs in the thread that
            reads; it must not block.
        detection_s: For how long a connection may be silent.
        dial: Dials a numbered set of connections to a peer; blocks for a limited time.
        lose: Declares a peer lost, with the cause.
        check_open: Raises an error if this worker has shut down.
    """

    name: str
    reactor: Reactor
    pool: BufferPool
    page_locks: PageLocks
    copier: Copier
    idle_s: float
    peers: Mapping[int, Any]
    post: Callable[[Any, Kind, bytes], None]
    on: Callable[[Kind, Callable[[Any, Bytes], None]], None]
    detection_s: float
    dial: Callable[[Any, int, int], list[socket.socket]]
    lose: Callable[[Any, str], None]
    check_open: Callable[[], None]

    def waiting(self, peer: Peer) -> Waiting:
        """Returns a block in which this thread waits for tensors of a peer, as reports show it."""
        began_s, name = time.monotonic(), f"tensors of worker {peer.name!r}"

        def parts() -> list[Wait]:
            # They come without any thread of the peer, like a value that is made already.
            return [Wait(VALUE, name, time.monotonic() - began_s, name, (peer.name,))]

        return self.reactor.waiting(parts)

    def wait_for(self, peer: Peer, events: Sequence[Any], limit_s: float) -> None:
        """Blocks until ``query`` of all events returns True, by looking at them.

        The thread does not count as running while it sleeps.

        Raises:
            NotInTime: The limit has passed.
            WeftError: The peer is lost, or this worker has shut down.
        """
        began_s, missing = time.monotonic(), list(events)
        with self.waiting(peer):
            while missing:
                if missing[-1].query():
                    missing.pop()
                    continue
                if peer.is_over:
                    raise peer.lost_error()
                self.check_open()
                elapsed_s = time.monotonic() - began_s
                if elapsed_s > limit_s:
                    raise NotInTime(f"a tensor is not there after {elapsed_s:.1f} s")
                # At first, other threads get the interpreter lock, and nothing more.
                pause_s = min(elapsed_s / 16, _LONGEST_SLEEP_S)
                time.sleep(pause_s if elapsed_s > _LOOKS_S else 0)


class Channel:
    """One way for tensor memory between this worker and its peers.

    Attributes:
        name: Its name, in reports and between workers.
        number: Its number in messages.
        from_bytes: Size of the smallest buffer that it takes.
        is_held: Whether the sender keeps a buffer until the receiver reports that it has it.
        is_for_devices: Whether it carries memory of devices, and not that of the host.
        sends_apart: Whether it sends bytes beside the message, and so has ``begin`` called. It may
            take buffers that are still being filled.
        is_tried: Whether the first buffer for a peer begins a trial.

    Args:
        home: What it needs of its worker.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    is_held: ClassVar[bool] = True
    is_for_devices: ClassVar[bool] = False
    sends_apart: ClassVar[bool] = False
    is_tried: ClassVar[bool] = False
    from_bytes = 0

    def __init__(self, home: Home) -> None:
        self._home = home
        self.counted_as = f"sent {self.name}"

    def describe(self) -> dict[str, Any]:
        """Returns what this side can do, as JSON, for all peers that connect."""
        return {}

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        """Returns why this side cannot receive from a peer; empty if it can.

        Raises:
            ProtocolError: The peer's description is malformed.
        """
        return ""

    def put(self, peer: Peer, token: int, buffers: Sequence[Any]) -> Sequence[Handle | None]:
        """Offers buffers of one message to the channel.

        Args:
            peer: The receiver, which has accepted the channel.
            token: Identifies the message among those to the peer.
            buffers: The buffers that no better channel has taken: flat contiguous tensors.

        Returns:
            A handle for each buffer that goes over this channel, and None for the others; nothing
            if there is none.
        """
        raise NotImplementedError

    def begin(
        self, peer: Peer, token: int, handles: Sequence[Any], *, may_wait: bool, copies: Copies
    ) -> None:
        """Called once the message of some handles is certain to be sent, if it sends apart.

        Args:
            peer: The receiver.
            token: The message.
            handles: The handles that ``put`` made for it.
            may_wait: Whether to block while much is waiting for the same peer already.
            copies: The copies from devices that still fill some buffers of the message, if any. The
                channel waits for all of them.
        """
        raise NotImplementedError

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[Received]:
        """Returns the buffers of a received message that came over the channel. May block.

        If it raises, nothing is left behind of any of them, as after ``drop``.

        Raises:
            CannotGet: They do not arrive; they are then asked for behind the message.
            ProtocolError: A handle is impossible.
            WeftError: The sender was lost, or this worker has shut down.
        """
        raise NotImplementedError

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        """Notes that the buffers of a received message will not be read.

        Raises:
            ProtocolError: A handle is impossible.
        """

    def lost(self, peer: Peer) -> None:
        """Frees what is kept for a peer that is lost, or has left."""

    def tick(self, now_s: float) -> None:
        """Frees what has not been used for a while; called every few seconds."""

    def hand_over(self) -> int | None:
        """Returns a descriptor for a peer that connects, for the caller to close; None for none."""
        return None

    def take(self, peer: Peer, connection: socket.socket, number: int) -> bool:
        """Takes a connection that a peer has dialled for this channel; False if there are none."""
        return False

    def abandon(self) -> None:
        """Frees all descriptors in a forked process; takes no lock."""

    def close(self, limit_s: float) -> None:
        """Ends the channel: this worker shuts down. Sends waiting data, for at most ``limit_s``."""


# The channels of one peer

INLINE, STREAM, LENT = "inline", "stream", "lent"
"""Names for reports: small and large buffers that follow their message, and shared memory."""
UNTRIED = "no tensor has been large enough to try it"
"""The obstacle of a channel that both sides have and that a first tensor tries."""
_UNCONFIRMED = "the peer has not confirmed yet that it can receive this way"


class Ways:
    """The channels to and from one peer. Thread-safe.

    Attributes:
        usable: The channels over which buffers are sent to the peer, best first.
        inline_limit_bytes: The largest buffer that counts as part of its message.

    Args:
        peer: Name of the peer, for the log.
        channels: All channels of this worker.
        verdict: Why each channel cannot receive from the peer here; empty if it can.
    """

    def __init__(
        self, peer: str, channels: Sequence[Channel] = (), verdict: Mapping[str, str] | None = None
    ) -> None:
        self._peer = peer
        self._channels = channels
        self._verdict = dict(verdict or {})
        self.inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self.usable: tuple[Channel, ...] = ()
        self._send_obstacles = {each.name: _UNCONFIRMED for each in channels}
        self._given_up: set[str] = set()
        self._untried = {each.name for each in channels if each.is_tried}
        self._lock = threading.RLock()

    def sizes(self) -> list[tuple[str, int]]:
        """Returns the channels for the host's memory, best first, with their smallest buffers."""
        return [(each.name, each.from_bytes) for each in self.usable if not each.is_for_devices]

    def verdict(self) -> dict[str, str]:
        """Returns for the peer why each channel fails here; empty if it works."""
        return self._verdict

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
        self._untried.discard(channel.name)

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
        _log.warning(
            "tensors to worker %r no longer travel by %s, but by %s: %s",
            self._peer,
            name,
            " or ".join(rest),
            reason,
        )

    def obstacles(self) -> dict[str, str]:
        """Returns for every channel why it is not used for sending; empty if it is."""
        found = {
            name: obstacle or (UNTRIED if name in self._untried else "")
            for name, obstacle in self._send_obstacles.items()
        }
        return {INLINE: "", STREAM: ""} | found

    def _update(self) -> None:
        # One assignment, so that senders need no lock.
        self.usable = tuple(
            [each for each in self._channels if not self._send_obstacles[each.name]]
        )
