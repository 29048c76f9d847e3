"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import autograd_functions as functions
from tests.contract.processes.functions import stopped
from tests.contract.processes.test_autograd_loss import FIRST, PROMPT_S, SECOND, every_mode
from torchweft import knobs, rpc
from torchweft.errors import AutogradError, BackwardTimeout
from torchweft.launch import Nursery, cluster

LIMIT_S = 1.0


@every_mode
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_a_pass_that_ends_by_its_time_limit_names_the_worker_that_it_waits_for(
    nursery: Nursery, name: str, mode: Any
) -> None:
    with (
        knobs.BACKWARD_TIMEOUT_S.override(LIMIT_S),
        cluster(workers=2, nursery=nursery, check=False) as group,
        torchweft.autograd.context() as context_id,
    ):
        first = rpc.rpc_sync(FIRST, functions.layer, (_leaf(),))
        value = rpc.rpc_sync(SECOND, functions.layer, (first,))
        with stopped(group.pids[name]):
            start_s = time.monotonic()
            with pytest.raises(BackwardTimeout, match=f"for worker '{name}'") as caught:
                torchweft.autograd.backward(context_id, [value.sum()], mode=mode)
            assert time.monotonic() - start_s < LIMIT_S + PROMPT_S
    error = caught.value
    assert isinstance(error, AutogradError)
    assert isinstance(error, TimeoutError)
    assert (error.worker, error.missing) == (name, (name,))


def _leaf() -> torch.Tensor:
    return functions.parameter("x") * 1
