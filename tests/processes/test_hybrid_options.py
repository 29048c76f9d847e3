"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract.processes.ddp_functions import join
from tests.contract.processes.hybrid_functions import (
    WORDS,
    make_net,
    spread,
    train_alone,
)
from tests.contract.processes.test_hybrid_options import (
    SERVER,
    STEPS,
    TRAINERS,
    check_equal,
    train_all,
)
from torchweft import rpc
from torchweft.embedding import Dynamic, TableConfig, TableWise, initial
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    with cluster(workers=3, nursery=nursery):
        for call in [
            rpc.rpc_async(name, join, args=(rank, 2, store)) for rank, name in enumerate(TRAINERS)
        ]:
            call.wait()
        yield


def test_a_table_with_dynamic_ids_trains_as_one_whose_rows_have_these_numbers() -> None:
    config = TableConfig("words", WORDS, 6, "sum", torch.float64, dynamic=Dynamic())
    ids = spread(torch.arange(WORDS))
    words = initial.values_of_ids(config, ids, range(6), 3)
    batches = [
        (
            (torch.tensor([2**40, 5]), torch.tensor([0, 2]), torch.ones(2, dtype=torch.float64)),
            torch.zeros(1, 2, dtype=torch.int64),
            torch.tensor([0]),
        )
    ]
    options = {"dynamic": {"words": Dynamic()}, "seed": 3, "batches": batches}
    places = {"tower.users": TableWise(SERVER), "days": TableWise(SERVER)}
    trained = train_all(places=places, **options)
    expected, losses = train_alone("sgd", "sgd", STEPS, torch.float64, words=words)
    weights = expected.pop("words.weight")
    check_equal(trained, expected)
    for state, _, _, _ in trained:
        places_of = torch.searchsorted(ids, state["words.ids"])
        assert torch.equal(ids[places_of], state["words.ids"])
        assert float((state["words.rows"] - weights[places_of]).abs().max()) <= 1e-12
    means = torch.tensor([own for _, own, _, _ in trained]).mean(0)
    assert means.tolist() == pytest.approx(losses, abs=1e-6)
    assert make_net().words.weight.shape[0] == WORDS
