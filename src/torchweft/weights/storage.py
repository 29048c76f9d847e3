"""The memory of versions: that of the next one is made before it is needed.

Memory that was never written has no pages yet. To find and clear them takes several times as long
as the copy of the weights into it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft import memory
from torchweft.engine.worker.agent import Agent
from torchweft.errors import NotInitialized

_log = logging.getLogger("torchweft")


class Memory(NamedTuple):
    """The memory of a version.

    Attributes:
        tensor: Bytes, of shape ``(size_bytes,)``.
        is_shared: Whether the workers of this host can map it.
    """

    tensor: Tensor
    is_shared: bool


class Storage:
    """Makes the memory of versions of one size. Thread-safe.

    Args:
        agent: The agent of this worker.
        size_bytes: Bytes of a version.
        is_pinned: Whether to page-lock the memory where that is possible, for copies from GPUs.
    """

    def __init__(self, agent: Agent, size_bytes: int, *, is_pinned: bool = False) -> None:
        self._agent = agent
        self._size_bytes = size_bytes
        self._is_pinned = is_pinned
        self._preparing = threading.Lock()
        self._spare: Memory | None = None
        self._has_warned = False

    @property
    def prepared(self) -> Memory | None:
        """The memory of the next version, if it is ready."""
        return self._spare

    def prepare_soon(self) -> None:
        """Has a thread of the worker make the memory of the next version; does not block."""
        self._agent.reactor.submit_task(self._prepare)

    def _prepare(self, _: object, __: object) -> None:
        with self._preparing:
            if self._spare is None:
                # Where there is none now, there may be some when it is needed.
                with contextlib.suppress(MemoryError, NotInitialized):
                    self._spare = self._shared()

    def take(self, agent: Agent) -> Memory:
        """Returns memory for a version; waits if it is being made.

        Args:
            agent: The agent of this worker now; it may have joined another group.
        """
        with self._preparing:
            if agent is not self._agent:
                self._agent, self._spare = agent, None
            spare, self._spare = self._spare, None
        if spare is not None:
            return spare
        try:
            return self._shared()
        except MemoryError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("weights are sent as copies, also on this host: %s", error)
            leased = agent.pool.lease(self._size_bytes)
            return Memory(torch.frombuffer(leased, dtype=torch.uint8), False)

    def _shared(self) -> Memory:
        if self._is_pinned:
            # Without the lock, copies take longer.
            with contextlib.suppress(MemoryError):
                made = memory.shared_empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
                return Memory(made, True)
        return Memory(memory.shared_empty(self._size_bytes, dtype=torch.uint8), True)
