"""The order of sums: a synchronous step has the bits of one process that sums in this order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.embedding_functions import RULES
from tests.processes.embedding_internals import ORDERED, train_ordered, train_ordered_alone
from torchweft import rpc
from torchweft.embedding import ColumnWise, RowWise, Tables, plan_tables
from torchweft.embedding.configs import Place
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1", "worker2"]
SERVERS = ["worker3", "worker4"]
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=5, nursery=nursery):
        yield


@pytest.mark.parametrize(
    ("rule", "place", "options"),
    [
        ("sgd", RowWise(*SERVERS), {}),
        ("adagrad", RowWise(*SERVERS), {"staleness": 0, "reduction": "mean"}),
        ("adam", ColumnWise(*SERVERS), {}),
        ("row-wise", RowWise(SERVERS[0]), {"reduction": "sum"}),
    ],
)
def test_a_bound_of_zero_has_the_bits_of_one_process_in_the_same_order_of_sums(
    rule: str, place: Place, options: dict[str, Any]
) -> None:
    plan = plan_tables([ORDERED], SERVERS, trainers=len(TRAINERS), places={"pages": place})
    tables = Tables(plan, name="initial")
    begin = tables.weights("pages")
    tables.close()
    futures = [
        rpc.rpc_async(name, train_ordered, (plan, TRAINERS, me, RULES[rule], STEPS), kwargs=options)
        for me, name in enumerate(TRAINERS)
    ]
    found = [future.wait() for future in futures]
    divisor = 1 if options.get("reduction") == "sum" else len(TRAINERS)
    expected = train_ordered_alone(
        begin.clone(), len(TRAINERS), RULES[rule], STEPS, divisor=divisor
    )
    assert not torch.equal(expected, begin)
    for weights in found:
        assert torch.equal(weights, expected)
