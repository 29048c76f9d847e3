"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import asyncio
import decimal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.processes.test_surroundings import FIRST, REQUEST, X, multiply
from torchweft import rpc
from torchweft.autograd import context
from torchweft.autograd.contexts import current_id

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

_left_open: list[context] = []


def look() -> dict[str, Any]:
    """Returns what a function sees of the settings that belong to a thread."""
    return {
        "request": REQUEST.get(),
        "numpy": np.geterr()["over"],
        "third": str(decimal.Decimal(1) / 3),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": str(torch.get_default_device()),
        "multithreading": torch._C._is_multithreading_enabled(),
        "forward mode": torch._C._is_fwd_grad_enabled(),
        "view replay": torch._C._is_view_replay_enabled(),
        "context": current_id(),
    }


def leave_behind() -> None:
    """Changes all of these, and restores none."""
    REQUEST.set("another request")
    np.seterr(over="raise")
    decimal.getcontext().prec = 5
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.set_default_device("meta")
    torch.autograd.set_multithreading_enabled(False)
    torch._C._set_fwd_grad_enabled(False)
    torch._C._set_view_replay_enabled(True)
    _left_open.append(context())
    _left_open[-1].__enter__()
    leave_together.wait(20)  # The calls of a test are in several threads.


leave_together = threading.Barrier(2)


def leave_open() -> None:
    while _left_open:
        _left_open.pop().__exit__(None, None, None)


async def leave_behind_async() -> None:
    REQUEST.set("another request")
    decimal.getcontext().prec = 5
    await asyncio.sleep(0)


async def look_async() -> dict[str, Any]:
    await asyncio.sleep(0)
    return look()


@pytest.mark.parametrize("looking", [look, look_async])
@pytest.mark.usefixtures("group")
def test_nothing_that_a_call_leaves_behind_reaches_another(
    looking: Callable[[], Any],
) -> None:
    wanted = rpc.rpc_sync(FIRST, looking)
    assert wanted["request"] == "none"
    assert wanted["third"] == "0.3333333333333333333333333333"
    torch.futures.wait_all([rpc.rpc_async(FIRST, leave_behind) for _ in range(2)])
    torch.futures.wait_all([rpc.rpc_async(FIRST, leave_behind_async) for _ in range(2)])
    futures = [rpc.rpc_async(FIRST, looking) for _ in range(10)]
    assert [future.wait() for future in futures] == [wanted] * 10
    rpc.rpc_sync(FIRST, leave_open)


@pytest.mark.usefixtures("group")
def test_a_callback_sees_what_is_set_where_it_is_added() -> None:
    def see(_: object) -> tuple[str, bool, int]:
        return REQUEST.get(), torch.is_grad_enabled(), current_id()

    future = rpc.rpc_async(FIRST, multiply, (X, 2.0))
    with context() as context_id:
        outside = REQUEST.set("mine")
        with torch.no_grad():
            seen = future.then(see)
        chained = seen.then(see)
        REQUEST.reset(outside)
    with torch.no_grad():
        assert seen.wait() == ("mine", False, context_id)
        assert chained.wait() == ("mine", True, context_id)
