"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.test_joining import assert_not_joined, join_alone
from tests.processes import internals
from torchweft import rpc
from torchweft.errors import (
    ConfigurationError,
    WeftError,
)
from torchweft.rpc import node
from torchweft.rpc.joining import join_group


@pytest.mark.parametrize("world_size", [1, None])
def test_a_bad_name_is_noticed_before_anybody_hears_of_it(world_size: int | None) -> None:
    store = HashStore()
    with pytest.raises(ConfigurationError, match="'no name' is no name"):
        join_group("no name", 0, world_size, rpc.RpcBackendOptions(store=store))
    assert store.num_keys() == 0
    assert_not_joined()


def test_a_coroutine_that_blocks_does_not_keep_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "END_LIMIT_S", 0.1)
    join_alone()
    try:
        blocked = rpc.rpc_async("alone", internals.block_event_loop, timeout=0)
        wait_until(lambda: internals.count_at_gate("loop") == 1, lambda: "it has not begun")
    finally:
        start_s = time.monotonic()
        rpc.shutdown(graceful=False)
        elapsed_s = time.monotonic() - start_s
        functions.open_gate("loop")
    assert elapsed_s < 2.0
    assert "blocks thread 'weft-alone-asyncio' at shutdown" in caplog.text
    with pytest.raises(WeftError):
        blocked.wait()
    assert_not_joined()


@pytest.mark.parametrize("world_size", [1, None])
def test_a_kept_future_or_reference_keeps_no_store(world_size: int | None, tmp_path: Path) -> None:
    # Rank 0 may host the store: a thread and ten descriptors.
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/rendezvous")
    rpc.init_rpc("alone", None, 0, world_size, options)
    try:
        store = weakref.ref(node.current_node().store)
        kept = rpc.RRef(1), rpc.rpc_async("alone", functions.name_here)
        assert kept[1].wait() == "alone"
        assert store() is not None
    finally:
        rpc.shutdown()
    wait_until(lambda: store() is None, lambda: "the store of a former group lives")
