"""Workers that run another version of torch: they say so when they join, as on other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.compat import rpc as compat_rpc

pytestmark = pytest.mark.timeout(60)

NAMES = ("a", "b")
OTHER = "1.13.1"


def join(
    name: str,
    world_size: int | None,
    path: str,
    version: str = "",
    other_versions: Literal["refuse", "warn"] = "refuse",
) -> None:
    if version:
        torch.__version__ = version  # type: ignore[assignment]
    options = rpc.RpcBackendOptions(
        init_method=f"file://{path}",
        init_timeout=15.0,
        rpc_timeout=15.0,
        other_versions=other_versions,
    )
    rank = NAMES.index(name)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def join_as_torch(name: str, path: str, version: str) -> None:
    """Joins as a program for PyTorch's RPC does."""
    if version:
        torch.__version__ = version  # type: ignore[assignment]
    options = compat_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rank = NAMES.index(name)
    compat_rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def double(to: str) -> list[float]:
    found: list[float] = rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist()
    return found


@pytest.fixture
def workers(warm: OpenWorkers) -> Iterator[OpenWorkers]:
    yield warm
    for name in NAMES:
        warm.kill(name)


def test_workers_that_allow_other_versions_exchange_tensors(
    workers: OpenWorkers, tmp_path: Path
) -> None:
    for name, version in zip(NAMES, ("", OTHER), strict=True):
        workers.begin(name, join, name, 2, str(tmp_path / "store"), version, "warn")
    for name in NAMES:
        workers.result(name)
    assert workers.do("a", double, "b") == workers.do("b", double, "a") == [2.0, 2.0]


def test_programs_for_pytorchs_rpc_work_with_other_versions(
    workers: OpenWorkers, tmp_path: Path
) -> None:
    for name, version in zip(NAMES, ("", OTHER), strict=True):
        workers.begin(name, join_as_torch, name, str(tmp_path / "store"), version)
    for name in NAMES:
        workers.result(name)
    assert workers.do("a", double, "b") == [2.0, 2.0]
