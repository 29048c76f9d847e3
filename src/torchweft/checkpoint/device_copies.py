"""Copies of tensors on GPUs, in host memory, that are waited for together."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.engine.channels.device_copies import HostCopies, PageLocks, Staging
from torchweft.engine.codec.tensors import flatten
from torchweft.engine.worker.current import current


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
