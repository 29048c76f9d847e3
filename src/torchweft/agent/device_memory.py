"""Tensors on GPUs: offered to workers of this host as device memory, else brought through the host.

See ``docs/protocols/devices.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.data_connections import Range
from torchweft.agent.fetching import Waiting, ask_for_supply
from torchweft.agent.peers import Peer
from torchweft.channel.buffers import Held
from torchweft.channel.cuda import (
    CannotMap,
    Driver,
    Exports,
    Imports,
    KnownHandles,
    NotReady,
    Offered,
    find_driver,
)
from torchweft.channel.staging import HostCopies, Staging
from torchweft.channel.table import CUDA_IPC, STRIPED, BufferTable, SharedHandle
from torchweft.channel.uploads import Uploads
from torchweft.errors import SerializationError
from torchweft.serialize.tensors import as_memory
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import Kind

_log = logging.getLogger("torchweft")


class DeviceMemory:
    """The tensors on GPUs that one worker sends and receives. Thread-safe.

    Args:
        agent: The worker's agent.
        driver: Shares device memory; None where there is no CUDA.
    """

    def __init__(self, agent: Agent, driver: Driver | None) -> None:
        self._agent = agent
        self._driver = driver
        self._exports = None if driver is None else Exports(driver)
        self._known: dict[int, KnownHandles] = {}
        self._imports: dict[int, Imports] = {}
        self._lock = threading.RLock()
        self._small_bytes = knobs.SMALL_ON_DEVICE_BYTES.get()
        self._look_s = knobs.SMALL_ON_DEVICE_S.get()
        self._stall_s = knobs.DEVICE_STALL_S.get()
        self._staging = Staging(agent.page_locks)
        self._uploads = Uploads(agent.pool, agent.page_locks)
        self._idle_s = knobs.POOL_IDLE_S.get()

    # Sending

    def prepare(
        self, peer: Peer, buffers: Sequence[Tensor]
    ) -> tuple[Sequence[Held], HostCopies | None]:
        """Returns the memory of flat tensors, some on devices, as it can be sent to a peer.

        Memory of devices is offered to the peer if that can copy it, and copied to the host
        otherwise. Small tensors whose values are there are copied as well, which is faster. To be
        called in a thread on whose current streams the values are made.

        Returns:
            The memory, and the copies to the host that are still under way, if any.
        """
        offered = self._offer(peer, buffers)
        copied = [
            place for place, buffer in enumerate(buffers) if place not in offered and buffer.is_cuda
        ]
        copies: HostCopies | None = None
        on_host: Iterator[memoryview] = iter(())
        if len(copied) == 1 and buffers[copied[0]].nbytes <= self._small_bytes:
            on_host = iter([as_memory(buffers[copied[0]].cpu())])  # Pinned memory is no gain.
        elif copied:
            kinds = {peer.channels.channel_for(buffers[place].nbytes) for place in copied}
            copies = self._staging.begin([buffers[place] for place in copied], cut=True)
            on_host = iter(copies.memories)
            if kinds != {STRIPED}:  # Other channels take the bytes at once.
                copies.wait()
                copies = None
        held: list[Held] = [
            offered[place]
            if place in offered
            else next(on_host)
            if buffer.is_cuda
            else as_memory(buffer.cpu())  # That is the buffer itself where it is on the CPU.
            for place, buffer in enumerate(buffers)
        ]
        return held, copies

    def _offer(self, peer: Peer, buffers: Sequence[Tensor]) -> dict[int, Offered]:
        """Offers to a peer the buffers that it can copy by itself; returns them by place."""
        exports, driver = self._exports, self._driver
        if exports is None or driver is None or not peer.channels.copies_devices:
            return {}
        indices = {place: driver.index_of(buffer) for place, buffer in enumerate(buffers)}
        on_devices = {place: index for place, index in indices.items() if index is not None}
        size_bytes = sum([buffers[place].nbytes for place in on_devices])
        if size_bytes <= self._small_bytes and self._are_done(driver, set(on_devices.values())):
            return {}
        found = {place: exports.offer(buffers[place], index) for place, index in on_devices.items()}
        return {place: each for place, each in found.items() if each is not None}

    def handles(self, peer: Peer, buffers: Sequence[Held]) -> list[SharedHandle]:
        """Returns the handles that have to go along with a message."""
        offered = [each for each in buffers if isinstance(each, Offered)]
        return self._known_to(peer).missing(offered)

    def released(self, peer: Peer, buffers: Sequence[Held]) -> None:
        """Notes that a peer has copied the memory of a message."""
        offered = [each for each in buffers if isinstance(each, Offered)]
        if offered:
            self._known_to(peer).learn(offered)

    def resupply(self, peer: Peer, buffers: Sequence[Held]) -> list[memoryview]:
        """Returns offered memory as a copy on the host: a peer could not copy it. Blocks."""
        offered = [each for each in buffers if isinstance(each, Offered)]
        if offered and all(each.is_ready() for each in offered):
            reason = f"worker {peer.name!r} cannot map this process's device memory"
            peer.channels.disable(CUDA_IPC, reason)
        return self._staging.to_host([each.tensor for each in offered])

    def _are_done(self, driver: Driver, devices: set[int]) -> bool:
        """Whether the work on this thread's current streams is done, now or in a moment."""
        streams = [driver.stream(device) for device in devices]
        end_s = time.perf_counter() + self._look_s
        while not all(stream.query() for stream in streams):
            if time.perf_counter() > end_s:
                return False
        return True

    def _known_to(self, peer: Peer) -> KnownHandles:
        return self._known.setdefault(peer.id, KnownHandles())

    # Receiving

    def upload(
        self,
        peer: Peer,
        buffers: Sequence[Buffer | Tensor],
        devices: Mapping[int, torch.device | None],
    ) -> list[Buffer | Tensor]:
        """Copies the host's memory that belongs on GPUs there; returns all buffers. Blocks.

        Args:
            peer: The sender.
            buffers: The memory of its message.
            devices: The device of each buffer by its place.

        Raises:
            torch.OutOfMemoryError: A device has too little memory.
        """
        wanted = {
            place: (memoryview(buffer), device)
            for place, buffer in enumerate(buffers)
            if (device := devices.get(place)) is not None
            and device.type == "cuda"
            and not isinstance(buffer, Tensor)
        }
        batch = self._uploads.batch()
        try:
            copies = {place: batch.add(*each) for place, each in wanted.items()}
        except torch.OutOfMemoryError as error:
            size_bytes = sum([memory.nbytes for memory, _ in wanted.values()])
            raise self._out_of_memory(peer, size_bytes, error) from None
        batch.wait()
        return [copies.get(place, buffer) for place, buffer in enumerate(buffers)]

    def fetch(
        self, peer: Peer, table: BufferTable, devices: Sequence[torch.device | None]
    ) -> Sequence[Buffer | Tensor]:
        """Copies the device memory of a message to devices of this worker. Blocks until it is done.

        Args:
            peer: The sender.
            table: The message's buffers.
            devices: For each buffer that comes this way, the device of its tensors here.

        Raises:
            ProtocolError: The sender's table is impossible.
            WorkerLost: The sender was lost before its memory could be copied.
            torch.OutOfMemoryError: A device here has too little memory.
        """
        entries = table.of_kind(CUDA_IPC)
        sizes = [entry.size_bytes for entry in entries]
        try:
            imports = self._imports_of(peer)
            imports.learn(table.handles)
            indices = [_index(device) for device in devices]
            with Waiting(self._agent, peer, self._stall_s) as waiting:
                pulled = imports.pull(entries, indices, waiting.for_events)
        except (CannotMap, NotReady) as error:
            return ask_for_supply(self._agent, peer, table.token, CUDA_IPC, sizes, error)
        except torch.OutOfMemoryError as error:
            self.drop(peer, table)
            raise self._out_of_memory(peer, sum(sizes), error) from None
        except BaseException:
            self.drop(peer, table)
            raise
        self._agent.note_pulled(peer, "cuda_ipc", sum(sizes))
        self.drop(peer, table)
        return pulled

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Tells the sender that its memory is no longer needed."""
        self._agent.sender.post_ints(peer, Kind.PULLED, table.token)

    def _out_of_memory(self, peer: Peer, size_bytes: int, error: Exception) -> Exception:
        return torch.OutOfMemoryError(
            f"worker {self._agent.info.name!r} has no room on its GPU for {size_bytes} bytes of "
            f"tensors from worker {peer.name!r}: {error}"
        )

    def _imports_of(self, peer: Peer) -> Imports:
        if self._driver is None:
            raise CannotMap("there is no CUDA here")
        with self._lock:
            imports = self._imports.get(peer.id)
            if imports is None:
                imports = self._imports[peer.id] = Imports(self._driver, f"worker {peer.name!r}")
            return imports

    def forget(self, peer: Peer, numbers: Sequence[int]) -> None:
        """Ends the mappings of allocations that a peer has freed."""
        imports = self._imports.get(peer.id)
        if imports is not None:
            imports.forget(numbers)

    # Housekeeping

    def tick(self) -> None:
        """Ends mappings that are not used, and tells peers of allocations that are gone."""
        for worker, imports in list(self._imports.items()):
            imports.trim(self._idle_s)
            if self._agent.peers[worker].is_over and imports.is_empty:
                self._imports.pop(worker, None)
        if self._exports is None or not self._known:
            return
        gone = self._exports.forget_freed()
        for worker, known in list(self._known.items()):
            numbers = known.forget(gone)
            if numbers:
                self._agent.sender.post_ints(self._agent.peers[worker], Kind.DEVICE_FREED, *numbers)

    def peer_lost(self, peer: Peer) -> None:
        """Ends the mappings of a lost worker's memory."""
        self._known.pop(peer.id, None)
        imports = self._imports.get(peer.id)
        if imports is not None:
            imports.close()

    def close(self) -> None:
        """Ends all mappings: this worker shuts down."""
        for imports in list(self._imports.values()):
            imports.close()


def device_memory(agent: Agent) -> DeviceMemory:
    """Returns the device memory of a worker on this machine."""
    return DeviceMemory(agent, find_driver() if knobs.CUDA_IPC.get() else None)


def ready_parts(copies: HostCopies, striped: Sequence[memoryview]) -> Iterator[Range]:
    """Yields the ranges of striped buffers as their bytes are there; others are waited for first.

    Args:
        copies: The copies that are under way.
        striped: The buffers of their message that are striped, and others.
    """
    positions = {id(memory): position for position, memory in enumerate(striped)}
    numbers = {
        number: positions.pop(id(memory), -1) for number, memory in enumerate(copies.memories)
    }
    deque(copies.parts([number for number, position in numbers.items() if position < 0]), maxlen=0)
    return _parts_of(copies, numbers, striped, positions.values())


def _parts_of(
    copies: HostCopies,
    numbers: dict[int, int],
    striped: Sequence[memoryview],
    complete: Iterable[int],
) -> Iterator[Range]:
    for position in complete:
        yield position, 0, striped[position].nbytes
    for number, start, end in copies.parts([n for n, position in numbers.items() if position >= 0]):
        yield numbers[number], start, end


def _index(device: torch.device | None) -> int:
    if device is None or device.type != "cuda":
        raise SerializationError(
            f"device memory of a worker is to become a tensor on {device or 'the CPU'}"
        )
    return device.index or 0
