"""Strict workers: no pickle is read, all that is plain goes through, and training works."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.processes import attacks, functions, training
from tests.processes.conftest import options
from tests.processes.open_workers import OpenWorkers
from weft import rpc
from weft.autograd import backward, context, get_gradients
from weft.errors import NotAllowed, RemoteError, SerializationError
from weft.launch import Cluster, Nursery
from weft.nn import RemoteModule

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
LARGE = 1 << 19


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    strict = options(strict=True)
    with weft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict) as group:
        yield group


def echo(value: Any, to: str = "worker0") -> Any:
    return rpc.rpc_sync(to, functions.identity, args=(value,))


# What goes through


def test_plain_values(group: Cluster) -> None:
    value = {
        "numbers": [1, -(1 << 80), 2.5, 1j, True, None],
        ("a", 1): {"text", b"bytes"},
        "torch": (torch.float16, torch.device("cpu"), torch.Size([1, 2])),
    }
    assert echo(value) == value
    assert rpc.rpc_sync("worker0", functions.collect, args=(1,), kwargs={"key": [2]}) == (
        (1,),
        {"key": [2]},
    )


def test_tensors_small_and_large_share_memory_as_before(group: Cluster) -> None:
    base = torch.arange(LARGE, dtype=torch.float32).reshape(-1, 64)
    arrived = echo({"base": base, "columns": base.T, "row": base[3], "small": torch.ones(3)})
    assert torch.equal(arrived["base"], base)
    assert arrived["columns"].stride() == base.T.stride()
    arrived["row"].zero_()
    assert not arrived["base"][3].any()
    assert torch.equal(echo(base), base)
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(echo([sparse])[0].to_dense(), torch.eye(4))


def test_references(group: Cluster) -> None:
    mine, theirs = rpc.RRef([1]), rpc.remote("worker0", functions.Accumulator)
    arrived = echo({"mine": mine, "theirs": [theirs]})
    assert arrived["mine"].local_value() is mine.local_value()
    assert theirs.rpc_sync().add(2.0) == 2.0
    assert theirs.remote().add(amount=1.0).to_here() == 3.0
    assert arrived["theirs"][0].rpc_async()(1.0).wait() == 4.0
    made = rpc.rpc_sync("worker0", functions.make_on, args=("worker1", [torch.ones(2)]))
    assert made.rpc_sync().get()[0].tolist() == [1, 1]


def test_functions_by_name(group: Cluster) -> None:
    names = ["worker1", "worker0"]
    called = rpc.rpc_sync("worker0", functions.call_through, args=(names, torch.add, (1, 2)))
    assert called == 3
    assert rpc.rpc_sync("worker0", functions.soon_through, args=("worker1", [3])) == [3]


def test_errors(group: Cluster) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        rpc.rpc_sync("worker0", functions.fail_with_cause)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail_with_cause" in str(caught.value.__cause__.__cause__)
    with pytest.raises(RemoteError, match="code 7: seven") as caught:
        rpc.rpc_sync("worker0", functions.fail_oddly)
    assert caught.value.type_name.endswith("OddError")
    assert caught.value.code == 7  # type: ignore[attr-defined]
    assert "in fail_oddly" in str(caught.value.__cause__)
    with pytest.raises(ArithmeticError, match="nobody else has my type"):
        rpc.rpc_sync("worker0", functions.fail_locally_defined)
    with pytest.raises(AttributeError, match="nothing"):
        attacks.call_named("worker0", b"tests.processes.functions:nothing", (), {})
    assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"


def test_what_several_workers_do_together(group: Cluster) -> None:
    calls = [rpc.rpc_async(name, attacks.gather_with, args=({"from": name},)) for name in NAMES]
    expected = {name: {"from": name} for name in NAMES}
    assert [call.wait() for call in calls] == [expected, expected]


NAMES = ["worker0", "worker1"]


def test_a_gathering_that_fails_says_why(group: Cluster) -> None:
    first = rpc.rpc_async("worker0", attacks.gather_with, args=(1,))
    with pytest.raises(SerializationError):
        rpc.rpc_sync("worker1", attacks.gather_thing)
    with pytest.raises(Exception, match="'worker1' failed in all_gather"):
        first.wait()


def test_a_program_trains_as_before(group: Cluster) -> None:
    losses, state = training.train_remotely("worker0", 4)
    assert losses == pytest.approx(training.train_locally(4))
    assert set(state) == set(attacks.Model().state_dict())


def test_a_remote_module_is_handed_on(group: Cluster) -> None:
    module = RemoteModule("worker0", attacks.Model)
    rows = torch.tensor([1])
    there = rpc.rpc_sync("worker1", attacks.run_module, args=(module, rows))
    assert torch.equal(there, module(rows).detach())


def test_a_backward_pass_with_large_gradients(group: Cluster) -> None:
    weight = torch.ones(LARGE, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    with context() as context_id:
        made = rpc.rpc_sync("worker0", attacks.scale_all, args=([weight, other], 3.0))
        backward(context_id, [made[0].sum() + made[1].sum()])
        gradients: dict[Tensor, Tensor] = get_gradients(context_id)
        assert torch.equal(gradients[weight], torch.full((LARGE,), 3.0))
        assert torch.equal(gradients[other], torch.full((3,), 3.0))


def test_a_backward_pass_that_fails(group: Cluster) -> None:
    weight = torch.ones(2, requires_grad=True)
    with context() as context_id:
        made = rpc.rpc_sync("worker0", attacks.fail_backward, args=(weight,))
        with pytest.raises(weft.errors.AutogradError, match="no way back") as caught:
            backward(context_id, [made.sum()])
    assert caught.value.worker == "worker0"


# What does not


@pytest.mark.parametrize("start", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_arguments_that_are_not_plain(group: Cluster, start: Any) -> None:
    with pytest.raises(SerializationError, match=r"args\[0\]\['deep'\]\[1\].*Tracked") as caught:
        start("worker0", functions.identity, args=({"deep": [1, functions.Tracked()]},))
    assert "strict" in str(caught.value)
    with pytest.raises(SerializationError, match="lambda"):
        start("worker0", lambda: 1)


def test_results_that_are_not_plain(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="Tracked"):
        rpc.rpc_sync("worker0", functions.Tracked)
    with pytest.raises(SerializationError, match="Tracked"):
        rpc.remote("worker0", functions.Tracked).to_here()


def test_a_pickle_that_comes_nevertheless(group: Cluster, tmp_path: Path) -> None:
    target = tmp_path / "was_here"
    for value in (attacks.Payload(str(target)), [1, 2], {"large": torch.ones(LARGE)}):
        with pytest.raises(NotAllowed, match="'worker0' is strict and was sent a pickle"):
            attacks.send_pickle("worker0", value)
    assert not target.exists()
    assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"


# One strict worker among others


def join(name: str, rank: int, method: str, strict: bool) -> None:
    chosen = rpc.RpcBackendOptions(init_method=method, rpc_timeout=20.0, strict=strict)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=chosen)


def exchange(to: str, target: str) -> list[Any]:
    """Makes calls of all kinds from a worker that trusts its group; returns what came of them."""
    outcomes: list[Any] = [rpc.rpc_sync(to, functions.identity, args=([1, torch.ones(2)],))[0]]
    for call in (
        functools.partial(rpc.rpc_sync, to, functions.identity, (attacks.Counter(),)),
        functools.partial(attacks.send_pickle, to, attacks.Payload(target)),
        functools.partial(rpc.rpc_sync, to, functions.fail_oddly),
    ):
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(type(error).__name__)
    # What a strict worker sends to one that is not may be anything.
    outcomes.append(rpc.rpc_sync(to, attacks.make_counter, (7,)).total)
    outcomes.append(os.path.exists(target))
    return outcomes


def leave() -> None:
    rpc.shutdown()


@pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
def test_others_know_which_worker_is_strict(tmp_path: Path) -> None:
    workers = OpenWorkers()
    method, target = f"file://{tmp_path / 'store'}", str(tmp_path / "was_here")
    try:
        workers.begin("strict", join, "strict", 0, method, True)
        workers.begin("open", join, "open", 1, method, False)
        for name in ("strict", "open"):
            workers.result(name)
        outcomes = workers.do("open", exchange, "strict", target)
        assert outcomes == [1, "SerializationError", "NotAllowed", "OddError", 7, False]
        for name in ("strict", "open"):
            workers.begin(name, leave)
        for name in ("strict", "open"):
            workers.result(name)
    finally:
        for name in ("strict", "open"):
            workers.kill(name)
        workers.close()
