"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os

import torchweft
from torchweft import rpc
from torchweft.launch import Nursery


def plain_because() -> str:
    from torchweft import native

    return "" if native.native is not None else native.reason


def test_the_setting_reaches_the_worker() -> None:
    with (
        Nursery(environment={**os.environ, "WEFT_NATIVE": "0"}) as nursery,
        torchweft.cluster(workers=1, nursery=nursery),
    ):
        assert "WEFT_NATIVE=0" in rpc.rpc_sync("worker0", plain_because)
