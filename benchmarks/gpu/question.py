"""The rows and sides of the benchmark of two processes on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import (
    GIGABYTES_PER_S,
    TORCH,
    WEFT,
    Form,
    Question,
    Row,
    Side,
    no_slower,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {
    "64 KiB": 64 * KIB,
    "1 MiB": MIB,
    "16 MiB": 16 * MIB,
    "64 MiB": 64 * MIB,
    "256 MiB": 256 * MIB,
    "1 GiB": GIB,
}
ROUND_BYTES = 4 * GIB
"""A round moves as many bytes, within the bounds on operations."""
LEAST_OPERATIONS, MOST_OPERATIONS = 4, 200
IN_FLIGHT = 100
WIDTHS = (2, 1024)
GPU = "cuda:0"

GPU_TORCH = Side(
    "torch",
    api="torch",
    options_by_rank=(
        {"device_maps": {"worker1": {GPU: GPU}}},
        {"device_maps": {"worker0": {GPU: GPU}}},
    ),
)
THROUGH_HOST = Side("weft host", api="weft", environment={"WEFT_CUDA_IPC": "0"}, is_default=False)
"""Weft through memory of the host, as where two processes cannot share memory of the GPU."""
COPY = Side("copy", runner="alone")
"""A copy from the GPU's memory to itself, in one process."""


def _rows() -> Iterator[Row]:
    for name, title in (
        ("round trip 8 B", "there and back, 2 numbers"),
        ("round trip 64 KiB", "there and back, 64 KiB"),
    ):
        yield Row(name, title, 300, targets=(no_slower(),), is_short=True)
    yield Row(
        "in flight",
        f"there and back, 2 numbers, {IN_FLIGHT} in flight",
        5 * IN_FLIGHT,
        targets=(no_slower(),),
        is_short=True,
        warm_up=IN_FLIGHT,
    )
    for width in WIDTHS:
        yield Row(
            f"backward {width}",
            f"forward and backward, 1 hop, {width:,} x {width:,}",
            100,
            targets=(no_slower(),),
            is_short=True,
            check=f"gradients {width}",
        )
    yield Row(
        "step",
        "a step: remote module, backward, optimizer",
        100,
        targets=(no_slower(),),
        is_short=True,
        check="losses",
    )
    # The large ones last: a side that fails takes no further part.
    for name, size_bytes in SIZES.items():
        operations = min(MOST_OPERATIONS, max(LEAST_OPERATIONS, ROUND_BYTES // size_bytes))
        yield Row(
            f"one way {name}",
            f"one way, {name}",
            operations,
            unit=GIGABYTES_PER_S,
            amount=size_bytes,
            limit="copy",
            targets=(no_slower(),),
            is_short=True,
            warm_up=min(10, operations),
        )


def question(device: str) -> Question:
    """Returns the question for a device; ``"cpu"`` is there to try the programs without a GPU."""
    is_gpu = device != "cpu"
    return Question(
        "benchmarks.gpu",
        "Two processes on one GPU" if is_gpu else "Two processes, the programs for one GPU on CPUs",
        tuple(_rows()),
        sides=(GPU_TORCH if is_gpu else TORCH, WEFT, THROUGH_HOST, COPY),
        about="Tensors on the GPU; a call ends when its receiver has all numbers there.",
        full=Form(rounds=5, placements=("not pinned",)),
        short=Form(rounds=3, scale=0.5, placements=("not pinned",)),
        limit_s=30.0,
        is_possible=_has_gpu,
    )


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


QUESTION = question(GPU)
