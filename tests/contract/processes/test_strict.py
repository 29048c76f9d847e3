"""Strict workers read no pickle and run only registered functions; training works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import attacks, functions, training
from tests.contract.processes.functions import options
from torchweft import rpc, weights
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import NotAllowed, SerializationError
from torchweft.launch import Cluster, Nursery
from torchweft.nn import RemoteModule

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


def test_functions_that_are_sent_are_looked_up_as_well(group: Cluster) -> None:
    for value in (torch.mul, [torch.mul], functions.process_id, dict):
        with pytest.raises(NotAllowed, match="not registered"):
            echo(value)
    assert echo([torch.add]) == [torch.add]


# One strict worker among others


def test_weights_are_followed_only_where_announcements_are_taken(group: Cluster) -> None:
    publisher = weights.Publisher({"values": torch.ones(2)})
    publisher.publish()
    with pytest.raises(NotAllowed, match=r"'worker0' .*torchweft\.weights needs .*CALLABLES"):
        rpc.rpc_sync("worker0", attacks.follow, (rpc.RRef(publisher),))
    assert attacks.follow(publisher) == 1  # a worker's calls to itself are not restricted
