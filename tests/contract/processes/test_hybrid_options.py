"""Hybrid models: calls for each step, rows ahead, and the options of their tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes import hybrid_functions
from tests.contract.processes.ddp_functions import join
from tests.contract.processes.hybrid_functions import (
    make_net,
    train_alone,
    train_scaled,
    train_with,
)
from torchweft import rpc
from torchweft.embedding import Cache, TableWise, Wire
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
TRAINERS = ["worker0", "worker1"]
SERVER = "worker2"
TABLES = ["words", "tower.users", "days"]
PLACES = {name: TableWise(SERVER) for name in TABLES}
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    with cluster(workers=3, nursery=nursery):
        for call in [
            rpc.rpc_async(name, join, args=(rank, 2, store)) for rank, name in enumerate(TRAINERS)
        ]:
            call.wait()
        yield


def train_all(**options: Any) -> list[Any]:
    options = {"places": PLACES, **options}
    futures = [
        rpc.rpc_async(name, train_with, args=(rank, STEPS), kwargs=options)
        for rank, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]


def check_equal(trained: list[Any], expected: dict[str, Tensor], bound: float = 1e-12) -> None:
    for state, *_ in trained:
        for name, values in expected.items():
            assert float((state[name] - values).abs().max()) <= bound, name


def test_all_tables_of_a_step_are_one_call_to_the_server() -> None:
    trained = train_all()
    # The first pass of a trainer makes a call for each table; the server counts the calls.
    calls = len(TABLES) + (STEPS - 1)
    assert trained[0][2] == {0: len(TRAINERS) * calls}
    check_equal(trained, train_alone("sgd", "sgd", STEPS, torch.float64)[0])


def test_a_stream_pulls_ahead_for_the_model_within_the_bound() -> None:
    expected = train_all()
    for ahead in (0, 2):
        found = train_all(ahead=ahead)
        check_equal(found, expected[0][0], 0.0)
        assert set(found[0][2]) == {0}
    for ahead in (1, 2):
        staleness = train_all(ahead=ahead, staleness=2)[0][2]
        assert max(staleness) <= 2
        # One use of rows from the server for each step; those pulled again are counted as pulls.
        assert sum(staleness.values()) <= len(TRAINERS) * (len(TABLES) + STEPS - 1)
    call = rpc.rpc_async(TRAINERS[0], train_with, args=(0, STEPS), kwargs={"places": PLACES})
    other = rpc.rpc_async(
        TRAINERS[1], train_with, args=(1, STEPS), kwargs={"places": PLACES, "staleness": 1}
    )
    for each, error in ((call, "TrainersDiffer"), (other, "TrainersDiffer")):
        with pytest.raises(ConfigurationError, match="staleness is 0 at the first and 1") as raised:
            each.wait()
        assert type(raised.value).__name__ == error


@pytest.mark.parametrize("max_norm", [None, 0.4])
def test_sums_over_trainers_are_those_of_all_parameters(max_norm: float | None) -> None:
    trained = train_all(reduction="sum", max_norm=max_norm, places={"words": TableWise(SERVER)})
    options = {} if max_norm is None else {"max_norm": max_norm}
    # The joined loss is a mean over twice the samples.
    expected, norms = train_alone("sgd", "sgd", STEPS, torch.float64, factor=2, **options)
    check_equal(trained, expected)
    if max_norm is not None:
        assert trained[0][1] == pytest.approx(norms, rel=1e-12)


def test_a_cache_and_a_form_on_the_wire_are_those_of_the_tables() -> None:
    exact = train_all()
    cached = train_all(cache=Cache(1.0), staleness=2)
    assert all(sum(hits.values()) > 0 for *_, hits in cached)
    assert max(cached[0][2]) <= 2
    rounded = train_all(wire=Wire(pulled="fp16", pushed="fp16"))
    difference = (rounded[0][0]["words.weight"] - exact[0][0]["words.weight"]).abs().max()
    assert 0 < float(difference) < 1e-2


def test_trainers_of_one_host_train_alike_as_a_group() -> None:
    trained = train_all(aggregate="host", max_norm=0.4)
    expected, norms = train_alone("sgd", "sgd", STEPS, torch.float64, max_norm=0.4)
    check_equal(trained, expected)
    assert trained[0][1] == pytest.approx(norms, rel=1e-12)
    assert set(trained[0][2]) == {0}


def test_a_hook_of_the_program_reduces_gradients() -> None:
    expected = train_all()
    for options in ({}, {"comm_state": []}):
        found = train_all(comm_hook=hybrid_functions.reduce_as_ddp, **options)
        check_equal(found, expected[0][0], 0.0)
    before = make_net(0).state_dict()
    found = train_all(comm_hook=hybrid_functions.forget_gradients)
    assert all(torch.equal(state["head.weight"], before["head.weight"]) for state, *_ in found)
    assert not any(
        torch.equal(state["words.weight"], before["words.weight"]) for state, *_ in found
    )


def test_a_sharded_scaler_leaves_a_step_out_on_all_trainers_if_rows_of_one_overflow() -> None:
    for overflows_at, scales in ((-1, [8.0, 8.0, 8.0]), (2, [8.0, 8.0, 4.0])):
        futures = [
            rpc.rpc_async(name, train_scaled, args=(rank, PLACES, overflows_at))
            for rank, name in enumerate(TRAINERS)
        ]
        found = [future.wait() for future in futures]
        assert [each for each, _ in found] == [scales, scales]
        steps = scales.count(8.0)
        check_equal([found[0][1:]], train_alone("sgd", "sgd", steps, torch.float64)[0])


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (hybrid_functions.raise_in_reduction, ("ArithmeticError", "in the hook")),
        (
            hybrid_functions.reduce_nothing,
            (
                "ArgumentTypeError",
                f"comm_hook {hybrid_functions.__name__}.reduce_nothing returned a Tensor; return",
            ),
        ),
    ],
    ids=["raises", "returns no future"],
)
def test_an_error_of_a_hook_is_that_of_the_backward_pass(hook: Any, expected: Any) -> None:
    futures = [
        rpc.rpc_async(name, hybrid_functions.raised_by_step, args=(rank, hook))
        for rank, name in enumerate(TRAINERS)
    ]
    for future in futures:
        kind, text = future.wait()
        assert kind == expected[0]
        assert expected[1] in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"comm_hook": 3}, ("ArgumentTypeError", "comm_hook is an int; pass a function")),
        ({"comm_state": []}, ("ConfigurationError", "comm_state is passed without comm_hook")),
        (
            {
                "comm_hook": hybrid_functions.reduce_as_ddp,
                "comm_state": [],
                "replicas": ["tower", "head"],
            },
            ("ConfigurationError", "comm_state is one for the replicas"),
        ),
    ],
    ids=["no function", "no hook", "one state for several replicas"],
)
def test_hooks_that_cannot_be_used_are_refused(arguments: Any, expected: Any) -> None:
    for kind, text in raised_by_all([arguments, arguments]):
        assert kind == expected[0]
        assert expected[1] in text


def test_trainers_have_the_same_hook() -> None:
    hooks = [hybrid_functions.reduce_as_ddp, hybrid_functions.forget_gradients]
    for kind, text in raised_by_all([{"comm_hook": each} for each in hooks]):
        assert kind == "TrainersDiffer"
        assert "comm_hook is" in text


def raised_by_all(arguments: list[dict[str, Any]]) -> list[tuple[str, str]]:
    futures = [
        rpc.rpc_async(name, hybrid_functions.raised_by_model, args=(rank, arguments[rank]))
        for rank, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]
