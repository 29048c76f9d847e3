"""The device that the GPU tests use, and how a process prepares for it.

``WEFT_TEST_DEVICE=cpu`` runs the tests without a GPU, except those that need one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device(os.environ.get("WEFT_TEST_DEVICE", "cuda:0"))
IS_GPU = DEVICE.type == "cuda"
CPU = torch.device("cpu")

only_gpu = pytest.mark.skipif(not IS_GPU, reason="there is no such thing on a CPU")

ENVIRONMENT = {
    # Workers are forked from processes that must not have initialised CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Results are compared with those of one process.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
}

KEEPS = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
"""For files whose workers, or whose own process, use a GPU: its driver keeps files and threads."""


@functools.cache
def missing() -> str:
    """Returns why the tests cannot run here, or nothing; does not initialise CUDA."""
    if not IS_GPU or torch.cuda.device_count():
        return ""
    return "there is no GPU here, or this torch cannot use it (WEFT_TEST_DEVICE=cpu does without)"


def prepare() -> None:
    """Makes the results of this process reproducible; each worker runs it before it joins."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def synchronize() -> None:
    """Waits for all work that this process has given to the device."""
    if IS_GPU:
        torch.cuda.synchronize(DEVICE)


def keep_busy(seconds: float) -> None:
    """Keeps the current stream of the device busy; returns at once, on a CPU without effect."""
    if IS_GPU:
        torch.cuda._sleep(int(seconds * _cycles_per_s()))  # type: ignore[no-untyped-call]


@functools.cache
def _cycles_per_s() -> float:
    cycles = 10_000_000
    times_s = []
    for _ in range(3):
        synchronize()
        begin_s = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        synchronize()
        times_s.append(time.perf_counter() - begin_s)
    return cycles / min(times_s)


def free_bytes() -> int:
    """Returns the free memory of the device, after giving back all that this process caches."""
    if not IS_GPU:
        return 0
    synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def wait_until(is_so: Callable[[], bool], message: Callable[[], str], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, message()
        time.sleep(0.05)
