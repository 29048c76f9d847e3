"""If a trainer dies before an average, the passes of the others end with an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.processes import ddp_functions as functions
from torchweft import rpc
from torchweft.errors import AutogradError
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

TRAINERS = FIRST, _ = ("worker0", "worker1")


def test_the_pass_of_a_trainer_fails_if_another_trainer_dies(
    nursery: Nursery, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    with cluster(workers=3, nursery=nursery, check=False):
        for function, arguments in [
            (functions.join, [(0, 2, store), (1, 2, store)]),
            (functions.make_replica, [("replica", {})] * 2),
        ]:
            calls = [
                rpc.rpc_async(trainer, function, args=own)
                for trainer, own in zip(TRAINERS, arguments, strict=True)
            ]
            for call in calls:
                call.wait()
        batch = torch.tensor([0, 1, 2, 3])
        for trainer in reversed(TRAINERS):
            last = rpc.rpc_async(trainer, functions.run_pass_or_die, args=("replica", batch))
        with pytest.raises(AutogradError) as caught:
            last.wait()
    assert caught.value.worker == FIRST
    assert "DistributedDataParallel" in caught.value.operation
