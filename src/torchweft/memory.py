"""Tensors in memory that the workers of one host share.

Such a tensor is passed to a call, or returned by one, without any copy. The tensor that the other
worker gets is the same memory. Each side sees at once what the other writes, as with the shared
tensors of ``torch.multiprocessing``. There is no lock: the program must order the writes, for
instance by the order of its calls::

    table = torchweft.memory.share(torch.randn(1_000_000, 64))
    torchweft.rpc_sync("reader", lookup, args=(table, rows))

Only this worker's own shared tensors, and views of them without gaps, travel this way; the other
worker passes its tensor on, or back, as a copy. To a worker that cannot map this memory (it is on
another host, or shared memory is switched off) every tensor travels as a copy.

The memory is freed once the tensor and its views are gone here and at every worker that received
it. It outlives this worker: a worker that has the tensor keeps it.

With ``pin_memory=True`` the memory is page-locked for this process as well, so that
``tensor.to("cuda", non_blocking=True)`` does not wait, and copies to and from GPUs are fast. Page
locks belong to a process: a worker that receives the tensor pins its own view of the memory, if it
copies that to a GPU often::

    def take(batch):
        torchweft.memory.pin(batch)
        return step(batch.to("cuda", non_blocking=True))

All page-locked memory of a worker together is limited by ``WEFT_PINNED_LIMIT_BYTES``.

``pooled_empty`` and ``prefer_huge_pages`` are for memory of this worker alone that is large: the
first use of fresh memory takes several times as long as its contents take to be copied.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.device_copies import HostCopies, PageLock, PageLocks, Staging
from torchweft.engine.channels.memory import advise_huge_pages
from torchweft.engine.channels.shm import SharedMemory, why_no_pool
from torchweft.engine.codec.reducers import has_memory
from torchweft.engine.codec.tensors import flatten
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.current import current
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo

__all__ = [
    "DeviceCopies",
    "has_memory",
    "is_shared_with",
    "pin",
    "pooled_empty",
    "prefer_huge_pages",
    "share",
    "shared_empty",
]


def shared_empty(*size: int, dtype: torch.dtype | None = None, pin_memory: bool = False) -> Tensor:
    """Makes an uninitialised tensor on the CPU in this worker's shared memory.

    Args:
        size: The shape.
        dtype: Any type of plain elements; by default torch's default type.
        pin_memory: Whether the memory is page-locked for this process, until the tensor and its
            views are gone here or the worker leaves its group. Initialises CUDA.

    Raises:
        NotInitialized: This process is not a worker.
        ConfigurationError: ``pin_memory`` is set, and this process has no GPU.
        MemoryError: This worker may have no more shared memory, see ``WEFT_SHM_LIMIT_BYTES``, or no
            more page-locked memory, see ``WEFT_PINNED_LIMIT_BYTES``.
    """
    agent = current()
    locks = _page_locks(agent) if pin_memory else None
    dtype = torch.get_default_dtype() if dtype is None else dtype
    size_bytes = math.prod(size) * dtype.itemsize
    if not size_bytes:
        return torch.empty(size, dtype=dtype, device="cpu")
    pool = agent.channels.of(SharedMemory).pool
    if pool is None:
        why = why_no_pool(knobs.SHM_LIMIT_BYTES.get())
        raise MemoryError(f"this worker has no shared memory: {why}")
    memory = pool.share(size_bytes, locks)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def share(tensor: Tensor, *, pin_memory: bool = False) -> Tensor:
    """Returns a contiguous copy of a tensor in this worker's shared memory, detached, on the CPU.

    Args:
        tensor: A dense tensor on any device.
        pin_memory: Whether the memory is page-locked, see ``shared_empty``.

    Raises:
        NotInitialized: This process is not a worker.
        ConfigurationError: ``pin_memory`` is set, and this process has no GPU.
        MemoryError: This worker may have no more shared or page-locked memory; see
            ``shared_empty``.
    """
    made = shared_empty(*tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
    return made.copy_(tensor.detach())


def pin(tensor: Tensor) -> Tensor:
    """Page-locks the memory of a tensor for this process, in place. Initialises CUDA.

    The lock covers the tensor's whole storage, and ends with this tensor and the views made of it.
    Detached tensors on the same memory do not keep the lock.

    Args:
        tensor: A dense tensor on the CPU, for instance a shared tensor that came with a call.

    Returns:
        The same tensor. It is left as it is if its memory is page-locked already.

    Raises:
        NotInitialized: This process is not a worker.
        ArgumentTypeError: The tensor is no dense tensor on the CPU.
        ConfigurationError: This process has no GPU.
        MemoryError: The memory cannot be page-locked, or this worker may have no more of it; see
            ``WEFT_PINNED_LIMIT_BYTES``.
    """
    locks = _page_locks(current())
    if not isinstance(tensor, Tensor) or not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{_described(tensor)} cannot be page-locked; pass a dense tensor on the CPU"
        )
    storage = tensor.untyped_storage()
    if not storage.nbytes() or tensor.is_pinned():
        return tensor
    lock = locks.lock(storage.data_ptr(), storage.nbytes(), keep=storage)
    if not isinstance(lock, PageLock):
        raise MemoryError(f"the tensor's memory cannot be page-locked: {lock}")
    # The finalizer keeps the lock, which keeps the storage: the lock ends first. It ends at once,
    # not in a queue, since the memory may be another worker's, which waits for it.
    weakref.finalize(tensor, lock.release).atexit = False
    return tensor


def is_shared_with(worker: str | int | WorkerInfo) -> bool:
    """Returns whether a worker maps this worker's shared memory, so that no copies travel to it.

    Known once the two have exchanged a message; until then False for another worker.

    Raises:
        NotInitialized: This process is not a worker.
        UnknownWorker: There is no such worker.
    """
    peer = current().find(worker)
    return peer.is_self or peer.ways.obstacles().get("shm") == ""


def pooled_empty(*size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Makes an uninitialised tensor on the CPU, in memory that this worker has used before.

    So its first use costs no page faults, if the worker has such memory to spare. The memory goes
    back to the worker's pool with the tensor and its views; see ``WEFT_POOL_LIMIT_BYTES``.

    Args:
        size: The shape.
        dtype: Any type of plain elements; by default torch's default type.

    Raises:
        NotInitialized: This process is not a worker.
        MemoryError: The system has no memory left.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    size_bytes = math.prod(size) * dtype.itemsize
    if not size_bytes:
        return torch.empty(size, dtype=dtype, device="cpu")
    memory = current().pool.lease(size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """Asks the system for huge pages under a tensor that was not used yet; it may decline.

    Reads at random places of a large tensor are faster then. Needs no worker.

    Args:
        tensor: A dense tensor on the CPU, just made by ``torch.empty``.

    Returns:
        The same tensor.
    """
    advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


class DeviceCopies:
    """Copies tensors on GPUs to the host: all copies are enqueued before any is waited for.

    The first copy from a device waits for all work that this process has given the device: calls
    of other threads, on streams of their own, may have changed the state just before. One thread at
    a time may use an object.

    Args:
        locks: Counts page-locked memory; that of this worker by default.
    """

    def __init__(self, locks: PageLocks | None = None) -> None:
        self._locks = locks
        self._staging: Staging | None = None
        self._settled: set[torch.device] = set()
        self._copies: list[HostCopies] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy in host memory, which has no content before ``wait`` returns.

        Args:
            tensor: A detached dense tensor on a GPU. It keeps its strides if it fills its memory.
        """
        tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.numel():
            return tensor.cpu()
        if self._locks is None:
            self._locks = current().page_locks
        if self._staging is None:
            self._staging = Staging(self._locks)
        if tensor.device not in self._settled:
            self._settled.add(tensor.device)
            self._locks.calls.wait_for_all(tensor.device)
        flat, strides = flatten(tensor)
        copies = self._staging.begin([flat])
        self._copies.append(copies)
        host = torch.frombuffer(copies.memories[0], dtype=torch.uint8).view(tensor.dtype)
        return (
            host.view(tensor.shape) if strides is None else host.as_strided(tensor.shape, strides)
        )

    def wait(self) -> None:
        """Blocks until all copies are complete. Later copies wait for their devices again."""
        for copies in self._copies:
            copies.wait()
        self._copies.clear()
        self._settled.clear()


def _page_locks(agent: Agent) -> PageLocks:
    if not agent.page_locks.calls.is_available():
        raise ConfigurationError(
            "memory can be page-locked only where there is a GPU, and this process has none "
            "(torch.cuda.is_available() is False); leave pin_memory out"
        )
    return agent.page_locks


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of layout {value.layout} on device {value.device}"
    return f"a {type(value).__name__}"
