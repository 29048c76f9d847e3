"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes.functions import identity
from torchweft import rpc
from torchweft.launch import Cluster, Nursery


@pytest.fixture(
    scope="module", params=["0", os.environ.get("WEFT_NATIVE", "auto")], ids=["plain", "same"]
)
def mixed(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A worker with the plain twin, or the same one as this process has."""
    environment = {**os.environ, "WEFT_NATIVE": request.param}
    with (
        Nursery(environment=environment) as nursery,
        torchweft.cluster(workers=1, nursery=nursery) as group,
    ):
        rpc.rpc_sync("worker0", identity, args=(torch.ones(2),))  # Connects.
        yield group


def plain_because() -> str:
    from torchweft import native

    return "" if native.native is not None else native.reason


def test_the_setting_reaches_the_worker(mixed: Cluster, request: pytest.FixtureRequest) -> None:
    told = rpc.rpc_sync("worker0", plain_because)
    if "[plain]" in request.node.name:
        assert "WEFT_NATIVE=0" in told
    else:
        assert told == plain_because()
