"""Hybrid models: one snapshot of both parts, lost workers, remote calls and bad input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes import hybrid_functions as functions
from tests.contract.processes.ddp_functions import join_all
from tests.contract.processes.embedding_functions import check_same, end_process
from torchweft import autograd, rpc
from torchweft.checkpoint import list_snapshots
from torchweft.embedding import Copies, RowWise, TableWise
from torchweft.errors import StateMismatch, WorkerLost
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
SPARE = "worker4"
BEFORE, LOST, STEPS = 3, 1, 6


def on_all(function: Callable[..., Any], *args: Any, is_numbered: bool = False) -> list[Any]:
    futures = [
        rpc.rpc_async(name, function, (number, *args) if is_numbered else args)
        for number, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]


def open_on(servers: list[str], places: Any = None, seed: int = 0) -> None:
    by_row = {"words": RowWise(*servers), "tower.users": RowWise(*servers), "days": Copies()}
    on_all(functions.open_model, servers, {**by_row, **(places or {})}, seed, is_numbered=True)


def make_steps(first: int, end: int) -> list[list[float]]:
    return [on_all(functions.make_step, step) for step in range(first, end)]


def weights() -> dict[str, Tensor]:
    first, second = on_all(functions.weights_of_model)
    check_same(first, second)
    found: dict[str, Tensor] = first
    return found


@pytest.fixture(scope="module")
def workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(workers=5, nursery=nursery):
        join_all(TRAINERS, tmp_path_factory.mktemp("gloo"))
        yield


def test_a_killed_server_is_restored_and_the_run_is_the_same_bit_by_bit(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=5, nursery=nursery, check=False):
        join_all(TRAINERS, tmp_path)
        open_on(SERVERS)
        expected_losses = make_steps(0, STEPS)
        expected = weights()
        on_all(functions.close_model)

        open_on(SERVERS)
        losses = make_steps(0, BEFORE - 1)
        # All trainers may call it; the first saves.
        folder = str(tmp_path / "snapshots")
        assert on_all(functions.save_model, folder, BEFORE - 1) == [True, False]
        losses += make_steps(BEFORE - 1, BEFORE)
        assert on_all(functions.save_model, folder, BEFORE, BEFORE - 1) == [True, False]
        make_steps(BEFORE, BEFORE + LOST)
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(SERVERS[1], end_process)
        for trainer in TRAINERS:
            with pytest.raises(WorkerLost, match=f"'{SERVERS[1]}'"):
                rpc.rpc_sync(trainer, functions.close_model)
        open_on([SERVERS[0], SPARE], seed=7)
        restored = on_all(functions.restore_model, str(tmp_path / "snapshots"))
        for number, (step, own, best, rates) in enumerate(restored):
            assert step == BEFORE
            # The state of the program is that of the first trainer.
            assert own == [of_all[0] for of_all in losses]
            assert best == own[-1] / 2
            assert rates == pytest.approx([0.025, 0.025, 0.01]), number
        losses += make_steps(BEFORE, STEPS)
        assert losses == expected_losses
        check_same(weights(), expected)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("places", "bound"),
    [
        ({"words": TableWise(SPARE), "tower.users": TableWise(SPARE)}, 0.0),
        ({"words": RowWise(SPARE, *SERVERS), "tower.users": RowWise(SPARE, *SERVERS)}, 1e-13),
    ],
    ids=["one server", "three servers"],
)
def test_a_snapshot_goes_onto_another_number_of_servers(
    tmp_path: Path, places: Any, bound: float
) -> None:
    whole = {"words": TableWise("worker2"), "tower.users": TableWise("worker3"), "days": Copies()}
    open_on(SERVERS, whole)
    make_steps(0, BEFORE)
    on_all(functions.save_model, str(tmp_path), BEFORE)
    assert [each.step for each in list_snapshots(tmp_path)] == [BEFORE]
    at_save = weights()
    make_steps(BEFORE, STEPS)
    expected = weights()
    on_all(functions.close_model)
    open_on([SPARE], places, seed=3)
    on_all(functions.restore_model, str(tmp_path))
    check_same(weights(), at_save)
    make_steps(BEFORE, STEPS)
    check_same(weights(), expected, bound)
    on_all(functions.close_model)


@pytest.mark.usefixtures("workers")
def test_a_model_without_servers_is_saved_as_well(tmp_path: Path) -> None:
    places = {name: Copies() for name in ("words", "tower.users", "days")}
    open_on([], places)
    make_steps(0, BEFORE)
    on_all(functions.save_model, str(tmp_path), BEFORE)
    make_steps(BEFORE, STEPS)
    expected = weights()
    on_all(functions.close_model)
    open_on([], places, seed=3)
    assert [each[0] for each in on_all(functions.restore_model, str(tmp_path))] == [BEFORE] * 2
    make_steps(BEFORE, STEPS)
    check_same(weights(), expected)
    on_all(functions.close_model)


@pytest.mark.usefixtures("workers")
def test_a_snapshot_of_another_placement_is_refused_by_all_and_nothing_changes(
    tmp_path: Path,
) -> None:
    open_on(SERVERS)
    on_all(functions.save_model, str(tmp_path), 1)
    on_all(functions.close_model)
    open_on(SERVERS, {"days": TableWise(SPARE)}, seed=3)
    before = weights()
    for call in [
        rpc.rpc_async(name, functions.restore_model, (str(tmp_path),)) for name in TRAINERS
    ]:
        with pytest.raises(StateMismatch, match=r"lacks 'days'"):
            call.wait()
    check_same(weights(), before)
    on_all(functions.close_model)


@pytest.mark.usefixtures("workers")
def test_another_worker_calls_the_model_of_each_trainer_in_one_pass() -> None:
    open_on(SERVERS)
    make_steps(0, 2)
    expected = weights()
    on_all(functions.close_model)
    open_on(SERVERS)
    for step in range(2):
        with autograd.context() as context_id:
            losses = on_all(functions.apply_model, step)
            autograd.backward(context_id, [torch.stack(losses).sum()])
            on_all(functions.step_in_context, context_id)
    check_same(weights(), expected, 1e-14)
    on_all(functions.close_model)


# Bad input


def errors_of(*arguments: dict[str, Any], seeds: tuple[int, int] = (0, 0)) -> list[Any]:
    given = arguments if len(arguments) > 1 else arguments * 2
    calls = [
        rpc.rpc_async(name, functions.raised_by_model, (number, own, seed))
        for number, (name, own, seed) in enumerate(zip(TRAINERS, given, seeds, strict=True))
    ]
    return [call.wait() for call in calls]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"places": {"word": Copies()}}, "PlacementError", "no nn.Embedding.*mean 'words'"),
        ({"servers": []}, "PlacementError", "no server is named.*'words.weight'"),
        ({"servers": ["worker9"]}, "UnknownWorker", "worker9"),
        ({"servers": "worker2"}, "ArgumentTypeError", "list of names"),
        ({"servers": None}, "ArgumentTypeError", "servers is None"),
        ({"places": ["words"]}, "ArgumentTypeError", "places is a list; pass a dict by path"),
        ({"touched": ["words"]}, "ArgumentTypeError", "touched is a list; pass a dict by path"),
        ({"wire": "fp16"}, "ArgumentTypeError", "wire is 'fp16'"),
        ({"find_unused_params": True}, "ArgumentTypeError", "mean 'find_unused_parameters'"),
        ({"touched": {"tower.user": 0.1}}, "PlanError", "'tower/user'.*did you mean"),
        ({"touched": {"words": 1.5}}, "PlanError", "from 0 to 1"),
        ({"batches": []}, "PlacementError", "no batch to count"),
        ({"replicas": ["tower"]}, "PlacementError", "'spare.weight' is in no module"),
        ({"replicas": ["towel"]}, "PlacementError", "no module of the model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: str, message: str) -> None:
    for kind, text in errors_of(arguments):
        assert kind == error, text
        assert re.search(message, text), text


@pytest.mark.usefixtures("workers")
def test_trainers_with_different_models_are_told_what_differs() -> None:
    for kind, text in errors_of({}, {"has_wider_head": True}):
        assert kind == "TrainersDiffer"
        assert "'worker0' and 'worker1'" in text
        assert "parameter 'head.weight' is of shape (1, 10) at the first" in text
    for kind, text in errors_of({}, {"places": {"days": Copies()}}):
        assert kind == "TrainersDiffer"
        assert "places" in text


@pytest.mark.usefixtures("workers")
def test_an_error_of_one_trainer_reaches_the_others() -> None:
    first, second = errors_of({}, {"places": {"word": Copies()}})
    assert second[0] == "PlacementError"
    assert first == ("TrainersDiffer", f"trainer 'worker1' has failed: PlacementError: {second[1]}")


@pytest.mark.usefixtures("workers")
def test_clipping_without_the_rows_on_servers_is_told_once() -> None:
    open_on(SERVERS)
    for told in on_all(functions.clip_dense_part, 0):
        (text,) = told
        assert text.startswith("clip_grad_norm_ leaves out gradients that are elsewhere")
        assert "clip_grad_norm_(max_norm)" in text
    on_all(functions.close_model)
