"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes.test_embedding import SERVERS, own_tables
from tests.processes.embedding_internals import refuse_to_change, set_rule_of_server
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    InputError,
    StepError,
    TableWise,
)
from torchweft.errors import (
    ConfigurationError,
)
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def test_a_server_refuses_gradients_that_do_not_fit_before_they_count() -> None:
    tables, optimizer = own_tables("checking")
    before = tables.weights("words")
    rows, values = torch.tensor([0]), torch.ones(1, 6, dtype=torch.float64)
    stack = next(
        number
        for number, each in enumerate(tables.plan.layout.stacks)
        if each.members[0].config.name == "words"
    )
    for part in [
        (rows + 10**6, values),
        (rows - 1, values),
        (rows, values[:, 1:]),
        (rows, values.float()),
        (torch.tensor([0, 2, 0]), 1, None, values),
        (torch.tensor([0, -1, 0]), 1, None, values),
        (torch.tensor([0, 1, 1]), 1, None, values),
        (torch.tensor([0, 1, -1]), 1, None, values),
        (torch.tensor([0, 1, 0]), 2, None, values),
        (torch.tensor([0, 1, 0]), -1, None, values),
        (torch.tensor([0, 1, 0]), 1, values[0], values),
        (torch.tensor([0, 1, 0]), 1, None, values[:, 1:]),
        (torch.tensor([0.0, 1.0, 0.0]), 1, None, values),
        (rows, rows, values),
    ]:
        pushes = [(stack, 1, [part])]
        with pytest.raises(InputError, match="server 'worker2' was") as caught:
            tables._client.call("push", {"worker2": (0, 0, 0.1, 0, pushes)})
        assert "words" in caught.value.table.split(", ")
    optimizer.step()  # The step was not counted: this one is expected.
    assert torch.equal(tables.weights("words"), before)
    tables.close()


def test_a_server_refuses_bags_that_do_not_fit() -> None:
    tables, _ = own_tables("bags")
    stack = next(
        number
        for number, each in enumerate(tables.plan.layout.stacks)
        if each.members[0].config.name == "words"
    )
    numbers, weights = torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.float64)
    for request in [
        (numbers, 1, 2, None),
        (numbers, 4, 0, None),
        (numbers, 2, 0, None),
        (numbers, -3, -1, None),
        (numbers, -1, 0, None),
        (torch.tensor([0, 1, 3, -1]), 2, 0, None),
        (numbers.float(), 1, 3, None),
        (numbers.view(1, 3), 1, 3, None),
        (numbers + 10**6, 1, 3, None),
        (numbers, 1, 3, weights[:2]),
        (numbers, 1, 3, weights.float()),
    ]:
        with pytest.raises(InputError, match="server 'worker2' was") as caught:
            tables._client.call("pull", {"worker2": (-1, 0, [(stack, *request)])})
        assert "words" in caught.value.table.split(", ")
    tables.close()


def test_a_server_that_could_not_apply_a_step_refuses_everything_after_it() -> None:
    tables, optimizer = own_tables("unapplied", {"words": TableWise("worker2")})
    ids = {"words": torch.tensor([[1, 2]])}
    tables(ids)["words"].sum().backward()
    optimizer.step()
    rpc.rpc_sync("worker2", refuse_to_change, ("unapplied",))
    tables(ids)["words"].sum().backward()
    optimizer.step()  # It is answered when it was checked, before it is applied.
    text = r"'worker2' has failed in the middle of a step.*no memory for the step.*restore a snapsh"
    for ask in (
        lambda: tables(ids),
        optimizer.step,
        lambda: tables.weights("words"),
        lambda: tables.set_weights("words", torch.zeros(40, 6, dtype=torch.float64)),
        tables.staleness,
    ):
        with pytest.raises(StepError, match=text) as caught:
            ask()
        assert (caught.value.server, caught.value.step, caught.value.expected) == ("worker2", 1, 1)
    tables.close()


def test_after_a_step_that_one_server_refused_no_other_server_takes_the_next() -> None:
    tables, optimizer = own_tables("refused")
    ids = {"words": torch.arange(8)[None]}
    rpc.rpc_sync(SERVERS[1], set_rule_of_server, ("refused", None))
    tables(ids)["words"].sum().backward()
    with pytest.raises(ConfigurationError, match="no optimizer is set for the tables on 'worker3'"):
        optimizer.step()
    rpc.rpc_sync(SERVERS[1], set_rule_of_server, ("refused", SGD(lr=0.1)))
    before = tables.weights("words")
    for _ in range(2):
        with pytest.raises(
            StepError, match=r"step 0 .* has failed before.* Nothing was sent"
        ) as it:
            optimizer.step()
        assert it.value.server == "worker2, worker3"
    assert torch.equal(tables.weights("words"), before)
    tables.close()
