"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.test_embedding_tuning import SERVERS
from tests.contract.processes.tuning_functions import (
    BATCH,
    MESSAGE_COST,
    ROW_COST,
    train,
    tuned,
)
from tests.processes.tuning_internals import count_pulls
from torchweft import rpc
from torchweft.embedding import (
    RowWise,
    TableWise,
)
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

TRAINERS = ["worker0", "worker1"]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def on_trainers(function: Any, *args: Any) -> list[Any]:
    calls = [
        rpc.rpc_async(name, function, (me, TRAINERS, SERVERS, *args))
        for me, name in enumerate(TRAINERS)
    ]
    return [call.wait() for call in calls]


def test_the_number_with_the_cheapest_step_is_found_and_rows_are_those_of_a_run_without() -> None:
    for server in SERVERS:
        rpc.rpc_sync(server, count_pulls)
    steps = 1 + 4 * 3 + 2
    expected = on_trainers(train, steps)[0][0]
    (content, found), (other_content, other_found) = on_trainers(tuned, steps)
    tuning, places = found
    # The counted costs of the model itself: 50, 40, 44, 50.
    assert tuning.measured == {
        count: MESSAGE_COST * max(count, 1) + ROW_COST * -(-BATCH // count)
        for count in (1, 2, 3, 4)
    }
    assert tuning.partitions == 2
    assert places == [str(RowWise(*SERVERS[:2]))] * 2 + [str(TableWise(SERVERS[0]))]
    assert other_found == found
    assert "2  40000.000 ms" in str(tuning)
    for name, values in expected.items():
        assert torch.equal(content[name], values), name
        assert torch.equal(other_content[name], values), name
