"""Tensors in memory that the workers of one host share.

Such a tensor is passed to a call, or returned by one, without any copy: the tensor that the other
worker gets is the same memory, and each side sees at once what the other writes, as with the
shared tensors of ``torch.multiprocessing``. There is no lock: the program must order the writes,
for instance by the order of its calls::

    table = torchweft.memory.share(torch.randn(1_000_000, 64))
    torchweft.rpc_sync("reader", lookup, args=(table, rows))

Only this worker's own shared tensors, and views of them without gaps, travel this way; the other
worker passes its tensor on, or back, as a copy. To a worker that cannot map this memory (it is on
another host, or shared memory is switched off) every tensor travels as a copy.

The memory is freed once the tensor and its views are gone here and at every worker that received
it. It outlives this worker: a worker that has the tensor keeps it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchweft.agent.current import current


def shared_empty(*size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Makes an uninitialised tensor on the CPU in this worker's shared memory.

    Args:
        size: The shape.
        dtype: Any type of plain elements; by default torch's default type.

    Raises:
        NotInitialized: This process is not a worker.
        MemoryError: This worker may have no more shared memory, see ``WEFT_SHM_LIMIT_BYTES``.
    """
    agent = current()
    dtype = torch.get_default_dtype() if dtype is None else dtype
    size_bytes = math.prod(size) * dtype.itemsize
    if not size_bytes:
        return torch.empty(size, dtype=dtype)
    pool = agent.memory.pool
    if pool is None:
        raise MemoryError(
            "this worker has no shared memory: the system has none, or WEFT_SHM_LIMIT_BYTES is 0"
        )
    memory = pool.share(size_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)


def share(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor in this worker's shared memory, detached.

    Raises:
        NotInitialized: This process is not a worker.
        MemoryError: This worker may have no more shared memory, see ``WEFT_SHM_LIMIT_BYTES``.
    """
    return shared_empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
