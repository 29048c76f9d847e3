"""Random sequences of operations of distributed optimizers, beside one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchweft
from tests import thorough
from tests.contract.processes import optimizer_sequences
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
COUNTS = {"pipeline": 600, "owners": 300, "servers": 300}


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


@pytest.mark.parametrize(
    ("kind", "seeds"), [(kind, lot) for kind in COUNTS for lot in thorough.lots(COUNTS[kind], 10)]
)
def test_a_random_sequence_of_operations_has_the_result_of_one_process(
    kind: str, seeds: range
) -> None:
    for seed in seeds:
        optimizer_sequences.run(kind, seed)
