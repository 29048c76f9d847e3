"""Presents this worker to programs as an agent, with the methods of PyTorch's agents."""

from __future__ import annotations

import time
from typing import Any

import torchweft.rpc
from torchweft.errors import CallTimeout
from torchweft.extending import is_open_group
from torchweft.ids import WorkerInfo
from torchweft.rpc import torch_names

_POLL_S = 0.002
_PERIOD_S = 0.001
_SLEEPS = 10


def measure_lateness_us() -> float:
    """Returns how late a sleeping thread wakes, on average, in microseconds.

    It sleeps some times, and measures how much later it runs again: the kernel must wake it, and it
    must get the interpreter lock. An arriving call has the same delay while other threads compute
    in Python.
    """
    start_s = time.perf_counter()
    for _ in range(_SLEEPS):
        time.sleep(_PERIOD_S)
    late_s = time.perf_counter() - start_s - _SLEEPS * _PERIOD_S
    return max(late_s, 0.0) / _SLEEPS * 1e6


class RpcAgent:
    """The worker that ``torchweft.rpc.init_rpc`` has made of this process.

    Args:
        options: The options that it was given.
        store: The store through which the workers found each other.
    """

    def __init__(self, options: Any = None, store: Any = None) -> None:
        self.store = store
        self._options = options
        self._may_drop_references = False
        self._measures_lateness = False
        self.held_at_end: list[str] = []
        """Lines about references still held at the end without permission to drop them."""

    # The group

    @property
    def is_static_group(self) -> bool:
        """Whether all workers join and leave together."""
        return not is_open_group()

    def get_worker_info(self, worker_name: Any = None) -> WorkerInfo:
        """Returns the name and rank of a worker, given by either, or of this worker."""
        return torchweft.rpc.get_worker_info(worker_name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns all workers of the group, by rank."""
        return torchweft.rpc.get_worker_infos()

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, dst: WorkerInfo) -> dict[Any, Any]:
        return dict(getattr(self._options, "device_maps", {}).get(dst.name, {}))

    # Current activity

    def enable_gil_profiling(self, flag: bool) -> None:
        """Sets whether ``get_metrics`` measures how long threads wait for the interpreter."""
        self._measures_lateness = flag

    def get_metrics(self) -> dict[str, str]:
        """Returns how busy this worker is, as text.

        ``agent.gil_average_wait_time_us`` is present while ``enable_gil_profiling`` is on: how
        late a thread that has work continues, see ``measure_lateness_us``.
        """
        metrics = torch_names.debug_info().agent
        if self._measures_lateness:
            metrics["agent.gil_average_wait_time_us"] = f"{measure_lateness_us():.3f}"
        return metrics

    def get_debug_info(self) -> dict[str, str]:
        """Returns how busy this worker is, and the bytes that it has exchanged, as text."""
        traffic = torchweft.rpc.traffic()
        return {
            **self.get_metrics(),
            "agent.bytes_sent": str(traffic.bytes_sent),
            "agent.bytes_received": str(traffic.bytes_received),
        }

    # Shutdown

    def sync(self) -> None:
        """Blocks until all workers have called this."""
        torchweft.rpc.barrier()

    def drop_references(self) -> None:
        """Permits dropping the program's remaining references, when no worker needs them."""
        self._may_drop_references = True

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Blocks until the calls of this worker have ended.

        Args:
            shutdown: Whether to wait for the calls of the whole group, and to have all references
                dropped. All workers must request that. In an open group this covers only this
                worker's calls and references, and it leaves; see ``torchweft.rpc.shutdown``.
            timeout: Seconds to wait at most; 0 for no limit.

        Raises:
            CallTimeout: The calls had not ended in time.
            ShutdownError: Not every worker has taken part; the message says which and why.
        """
        if shutdown:
            may_drop = self._may_drop_references
            self.held_at_end = torch_names.leave(timeout, notes_held=not may_drop)
        else:
            self._await_calls(timeout)

    def _await_calls(self, timeout: float) -> None:
        start_s = time.monotonic()
        while callees := torch_names.open_callees():
            elapsed_s = time.monotonic() - start_s
            if timeout and elapsed_s > timeout:
                listed = ", ".join(f"worker {name!r}" for name in callees)
                raise CallTimeout(
                    f"timed out in join after {timeout:.2f} seconds: calls of this worker to "
                    f"{listed} have not ended",
                    worker=callees[0],
                    elapsed_s=elapsed_s,
                )
            time.sleep(_POLL_S)

    def shutdown(self) -> None:
        """Ends this worker at once; calls that wait for it fail."""
        torchweft.rpc.shutdown(graceful=False)


class TensorPipeAgent(RpcAgent):
    """The agent of back-end ``TENSORPIPE``, which is Weft."""
