"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.embedding_functions import configs_of
from tests.contract.processes.functions import options
from tests.contract.processes.test_embedding_strict import ME, SERVERS
from torchweft import checkpoint, embedding, hybrid, rpc
from torchweft.embedding import (
    SGD,
    IdOutOfRange,
    InputError,
    Tables,
    plan_tables,
    server,
)
from torchweft.embedding.layout import pieces_of
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotAllowed
from torchweft.hybrid.clipping import measure
from torchweft.launch import Nursery

pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    strict = options(
        strict=True,
        callables=(*embedding.CALLABLES, *hybrid.CALLABLES, *checkpoint.CALLABLES),  # type: ignore[arg-type]
    )
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict):
        yield


def test_what_servers_are_sent_is_checked() -> None:
    tables = Tables(plan_tables(configs_of(torch.float64), SERVERS, trainers=1), trainers=[ME])
    tables.optimizer(SGD())
    everywhere, call = torch.tensor([0, 1 << 30]), tables._client.call
    with pytest.raises(IdOutOfRange, match="asked for row 1073741824"):
        call("pull", {"worker0": (-1, 0, [(0, everywhere)])})
    for pushes in ([(0, 1, [(everywhere, torch.zeros(2, 6))])], [(0, 1, [(everywhere[:1],) * 2])]):
        with pytest.raises((IdOutOfRange, InputError)):
            call("push", {"worker0": (0, 0, 0.1, 0, pushes)})
    for given in (("others", {"layout": ()}), (b"tables", tables._options)):
        with pytest.raises(ArgumentTypeError, match="of a call of Weft's own"):
            rpc.rpc_sync("worker0", server.set_up, given)
    held = next(each for each in pieces_of(tables.plan.layout) if each.piece.server == "worker0")
    link = [
        (held.piece.plain(), tables._client._hosts.references["worker0"])
    ]  # It refers to no entry.
    for method, args in (
        ("set_rule", ("adam",)),
        ("push", (0, 0, "fast", 0, [])),
        ("pull", (b"0", 0, [])),
        ("adopt", ([link], "mark", 5.0)),
    ):
        with pytest.raises(ArgumentTypeError, match="of a call of Weft's own"):
            call(method, {"worker0": args})
    tables.close()


def test_only_exposed_methods_are_called() -> None:
    tables = Tables(plan_tables(configs_of(torch.float64), SERVERS, trainers=1), trainers=[ME])
    for method in ("settled", "worker_lost", "set_mark", "use"):
        with pytest.raises(NotAllowed, match=method):
            tables._client.call(method, {"worker0": ()})
    tables.close()


def test_gradients_whose_norm_is_measured_are_checked() -> None:
    plan = plan_tables(configs_of(torch.float64), SERVERS, trainers=1)
    tables = Tables(plan, name="measured", trainers=[ME])
    key = "measured", "token", 1
    beyond = {0: [(torch.tensor([1 << 30]), torch.zeros(1, 6, dtype=torch.float64))]}
    for given, error in (
        ((key, 0, 2.0, True, beyond), IdOutOfRange),
        ((key, 0, 2.0, True, {0: [(torch.tensor([0]), torch.zeros(1, 5))]}), InputError),
        ((key, 0, 2.0, True, {9: []}), InputError),
        ((key, 1, 2.0, True, {}), ConfigurationError),
        ((("others", "token", 1), 0, 2.0, True, {}), ConfigurationError),
        (("measured", 0, 2.0, True, {}), ArgumentTypeError),
        ((key, 0, "2", True, {}), ArgumentTypeError),
    ):
        with pytest.raises(error):
            rpc.rpc_sync("worker0", measure, given)
    given = {0: [(torch.tensor([0]), torch.ones(1, 6, dtype=torch.float64))]}
    found = rpc.rpc_sync("worker0", measure, (key, 0, 2.0, True, given))
    assert float(found) == pytest.approx(6**0.5)
    tables.close()


def test_anything_else_is_refused() -> None:
    for function in (functions.identity, server.host_of, embedding.fit_step_cost):
        with pytest.raises(NotAllowed, match="not registered"):
            rpc.rpc_sync("worker0", function, (1,))
