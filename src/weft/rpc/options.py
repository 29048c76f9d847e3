"""What a worker can be told when it joins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from weft import knobs
from weft.errors import ConfigurationError
from weft.rpc.handles import RRef


@dataclass
class RpcBackendOptions:
    """Options of one worker.

    Attributes:
        num_worker_threads: User functions that run at a time. One that waits for another worker
            does not count, so calls that call each other in circles never run out of threads.
        rpc_timeout: Seconds a call may take unless it says otherwise; 0 for no limit.
        init_method: How the workers find each other: ``env://`` (``MASTER_ADDR`` and
            ``MASTER_PORT``, as ``weft run`` and ``torchrun`` set them), ``tcp://host:port`` (where
            rank 0 runs), or ``file:///path`` (on a file system that all share).
        store: A ``torch.distributed.Store`` to use instead of ``init_method``; a group needs one
            without keys of an earlier group.
        init_timeout: Seconds to wait for all workers to join.
        listen: Address of this machine on which other hosts can reach this worker. By default
            that of ``WEFT_LISTEN``, and without it none: workers of this host only.
        reference_type: Class of the references that this worker makes and receives; a subclass
            of ``RRef``.
        copy_to_self: Whether tensors in calls of this worker to itself are copied, as those to
            others are. By default both sides have the same tensors.
    """

    num_worker_threads: int = field(default_factory=knobs.WORKER_THREADS.get)
    rpc_timeout: float = field(default_factory=knobs.RPC_TIMEOUT_S.get)
    init_method: str | None = None
    store: Any = None
    init_timeout: float = field(default_factory=knobs.INIT_TIMEOUT_S.get)
    listen: str = field(default_factory=knobs.LISTEN.get)
    reference_type: type[RRef[Any]] = RRef
    copy_to_self: bool = False

    @property
    def default_timeout_s(self) -> float:
        """``rpc_timeout`` with infinity for no limit."""
        return self.rpc_timeout or math.inf

    def check(self) -> None:
        """Raises ConfigurationError for the first value that cannot work."""
        threads = self.num_worker_threads
        if not isinstance(threads, int) or threads < 1:
            raise ConfigurationError(f"num_worker_threads is {threads!r}; it must be at least 1")
        if not _is_number(self.rpc_timeout) or not self.rpc_timeout >= 0:
            raise ConfigurationError(
                f"rpc_timeout is {self.rpc_timeout!r}; it must be a number of seconds, "
                "or 0 for no limit"
            )
        if not _is_number(self.init_timeout) or not 0 < self.init_timeout < math.inf:
            raise ConfigurationError(
                f"init_timeout is {self.init_timeout!r}; it must be a positive number of seconds"
            )
        if self.store is not None and self.init_method is not None:
            raise ConfigurationError("give init_method or store, not both")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
