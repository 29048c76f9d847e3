"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes import hybrid_functions as functions
from tests.contract.processes.ddp_functions import join_all
from tests.contract.processes.embedding_functions import end_process
from tests.contract.processes.test_hybrid_snapshots import SERVERS, TRAINERS, on_all, open_on
from tests.processes import hybrid_internals
from torchweft import rpc
from torchweft.errors import CallTimeout, WorkerLost
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]


@pytest.fixture(scope="module")
def workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(workers=5, nursery=nursery):
        join_all(TRAINERS, tmp_path_factory.mktemp("gloo"))
        yield


def test_a_trainer_that_is_lost_fails_the_norm_of_the_others(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=4, nursery=nursery, check=False):
        join_all(TRAINERS, tmp_path)
        open_on(SERVERS)
        clipped = rpc.rpc_async(TRAINERS[0], hybrid_internals.measure_alone)
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(TRAINERS[1], end_process)
        with pytest.raises(WorkerLost, match=f"'{TRAINERS[1]}'"):
            clipped.wait()


@pytest.mark.usefixtures("workers")
def test_a_trainer_that_does_not_clip_is_told() -> None:
    open_on(SERVERS)
    message = "tables 'hybrid' needs all trainers, 'worker0', 'worker1'; each calls clip_grad_norm_"
    with pytest.raises(CallTimeout, match=message):
        rpc.rpc_sync(TRAINERS[0], hybrid_internals.measure_alone, (0.3,))
    on_all(functions.close_model)
    # What the trainer has sent is not used by the next model of this name.
    open_on(SERVERS)
    norms = on_all(functions.make_step, 0, 0.1)
    assert norms[0] == norms[1]
    on_all(functions.close_model)
