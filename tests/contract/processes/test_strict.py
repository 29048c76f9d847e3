"""Strict workers read no pickle and run only registered functions; training works."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import attacks, functions, training
from tests.contract.processes.functions import options
from tests.open_workers import OpenWorkers
from torchweft import rpc, weights
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import ArgumentTypeError, NotAllowed, RemoteError, SerializationError
from torchweft.launch import Cluster, Nursery
from torchweft.nn import RemoteModule, owner
from torchweft.serialize.tracebacks import places_of

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
LARGE = 1 << 19
CALLABLES = (
    *(functions.Accumulator, functions.Tracked, functions.add, functions.call_through),
    *(functions.collect, functions.fail_locally_defined, functions.fail_oddly),
    *(functions.fail_with_cause, functions.identity, functions.make_on, functions.name_here),
    *(functions.soon, functions.soon_through, torch.add, torch.optim.SGD),
    *(attacks.Counter, attacks.Model, attacks.fail_backward, attacks.gather_thing),
    *(attacks.gather_with, attacks.loss_of, attacks.run_module, attacks.scale_all),
    *(attacks.is_imported, attacks.make_counter, remains.count_references, attacks.follow),
)


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    strict = options(strict=True, callables=CALLABLES)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict) as group:
        yield group


def echo(value: Any, to: str = "worker0") -> Any:
    return rpc.rpc_sync(to, functions.identity, args=(value,))


# What strict workers accept


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
    assert "in fail_with_cause" in places_of(caught.value.__cause__)[0]
    with pytest.raises(RemoteError, match="code 7: seven") as caught:
        rpc.rpc_sync("worker0", functions.fail_oddly)
    assert caught.value.type_name.endswith("OddError")
    assert caught.value.code == 7  # type: ignore[attr-defined]
    assert "in fail_oddly" in places_of(caught.value)[0]
    with pytest.raises(ArithmeticError, match="nobody else has my type"):
        rpc.rpc_sync("worker0", functions.fail_locally_defined)
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
        with pytest.raises(torchweft.errors.AutogradError, match="no way back") as caught:
            backward(context_id, [made.sum()])
    assert caught.value.worker == "worker0"


# What strict workers refuse


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


@pytest.mark.parametrize(
    "name",
    [
        b"os:system",
        b"this:d",
        b"builtins:eval",
        b"builtins:dict",
        b"numpy:ndarray",
        b"torch:mul",
        b"torch:Tensor",
        b"torch:ops.aten.add",
        b"tests.contract.processes.attacks:system",
        b"tests.contract.processes.attacks:Payload",
        b"tests.contract.processes.attacks:Counter.add",
        b"tests.contract.processes.attacks:Counter.__init__",
        b"tests.contract.processes.functions:nothing",
        b"torchweft.compat.rpc.internal:run_pickled",
        b"torchweft.compat.rpc.references:_rref_typeof_on_owner",
        b"torchweft.checkpoint.owner:discard",
        b"torchweft.rpc.joining:shutdown",
        b"torchweft.errors:NotAllowed",
    ],
    ids=bytes.decode,
)
def test_names_that_are_not_registered(group: Cluster, name: bytes) -> None:
    for kwargs in ({}, {"key": 1}):  # simple values, and containers
        with pytest.raises(
            NotAllowed, match=r"'worker0' is strict.*(rpc\.register|CALLABLES)"
        ) as caught:
            attacks.call_named("worker0", name, (1,), kwargs)
        assert caught.value.worker == "worker0"
    assert not rpc.rpc_sync("worker0", attacks.is_imported, args=("this",))


def test_functions_that_are_sent_are_looked_up_as_well(group: Cluster) -> None:
    for value in (torch.mul, [torch.mul], functions.process_id, dict):
        with pytest.raises(NotAllowed, match="not registered"):
            echo(value)
    assert echo([torch.add]) == [torch.add]


def test_only_declared_methods_are_called(group: Cluster) -> None:
    counter = rpc.remote("worker0", attacks.Counter, args=(1,))
    assert counter.rpc_sync().add(2) == 3
    assert counter.remote()(2).to_here() == 5
    for name in ("double", "_reset", "__init__", "__class__", "__len__", "__dict__", "nothing"):
        with pytest.raises(NotAllowed, match=r"rpc\.expose"):
            counter.rpc_async()._call(name).wait()
    for value in (torch.ones(2), [1], "text"):
        reference = rpc.remote("worker0", functions.identity, args=(value,))
        with pytest.raises(NotAllowed, match="declares no such method"):
            reference.rpc_sync().__len__()
        with pytest.raises(NotAllowed, match="declares no such method"):
            reference.rpc_sync().fill_(1)


def test_modules_that_a_remote_module_has_made_and_others(group: Cluster) -> None:
    made = RemoteModule("worker0", attacks.Model)
    other = RemoteModule.from_module_rref(rpc.remote("worker0", attacks.Model))
    rows = torch.tensor([1])
    assert made(rows).shape == (1, 2)
    assert len(made.remote_parameters()) == 3
    for attack in (
        lambda: other(rows),
        lambda: other.forward_async(rows).wait(),
        lambda: other.then(torch.add, 1)(rows),
        lambda: made.then(other.module_rref)(rows),
        lambda: made.then(torch.mul, 1)(rows),
        lambda: made.apply(torch.mul),
        lambda: other.requires_grad_(False),
        lambda: other.remote_parameters(),
        lambda: other.train(),
        lambda: other.state_dict(),
        lambda: made.get_module_rref().rpc_sync().forward(rows),
        lambda: RemoteModule("worker0", torch.nn.Linear, args=(1, 1)),
    ):
        with pytest.raises(NotAllowed):
            attack()
    with pytest.raises(SerializationError, match="convert the local parts alone"):
        torch.nn.Sequential(made).double()
    with pytest.raises(ArgumentTypeError, match=r"key .* is a int, not a str"):
        rpc.rpc_sync("worker0", owner.load_state, args=(made.module_rref, {1: rows}))
    with pytest.raises(ArgumentTypeError, match="not to a module"):
        rpc.rpc_sync("worker0", owner.state, args=(rpc.remote("worker0", attacks.Counter), ""))


# One strict worker among others


def join(name: str, rank: int, method: str, strict: bool) -> None:
    chosen = rpc.RpcBackendOptions(
        init_method=method,
        rpc_timeout=20.0,
        strict=strict,
        callables=CALLABLES if strict else (),
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=chosen)


def exchange(to: str, target: str) -> list[Any]:
    """Makes calls of all kinds from a worker that trusts its group; returns their outcomes."""
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
    # A strict worker may send any value to a worker that is not strict.
    outcomes.append(rpc.rpc_sync(to, attacks.make_counter, (7,)).total)
    outcomes.append(os.path.exists(target))
    return outcomes


def test_weights_are_followed_only_where_announcements_are_taken(group: Cluster) -> None:
    publisher = weights.Publisher({"values": torch.ones(2)})
    publisher.publish()
    with pytest.raises(NotAllowed, match=r"'worker0' .*torchweft\.weights needs .*CALLABLES"):
        rpc.rpc_sync("worker0", attacks.follow, (rpc.RRef(publisher),))
    assert attacks.follow(publisher) == 1  # a worker's calls to itself are not restricted


def leave() -> None:
    rpc.shutdown()


@pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
def test_others_know_which_worker_is_strict(warm: OpenWorkers, tmp_path: Path) -> None:
    workers = warm
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
