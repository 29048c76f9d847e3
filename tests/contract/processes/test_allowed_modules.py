"""Workers with an allow-list: attacks only get an error, and programs work as before."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import attacks, functions, training
from tests.contract.processes.functions import options
from torchweft import rpc
from torchweft.errors import NotAllowed
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
ALLOWED = (attacks.__name__, functions.__name__, "tests.remains", "torch")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    restricted = options(allowed_modules=ALLOWED)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=restricted) as group:
        yield group


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A file that must not appear."""
    path = tmp_path / "was_here"
    yield str(path)
    assert not path.exists()


def all_work() -> None:
    for name in ("worker0", "worker1"):
        assert rpc.rpc_sync(name, functions.name_here, timeout=5) == name


# Attacks by name


@pytest.mark.parametrize("start", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_each_way_to_call(group: Cluster, mark: str, start: Any) -> None:
    def call() -> None:
        outcome = start("worker0", os.system, args=(f"touch {mark}",))
        outcome.to_here() if isinstance(outcome, rpc.RRef) else outcome.wait()

    with pytest.raises(NotAllowed):
        call()
    all_work()


def test_functions_by_value(group: Cluster, mark: str) -> None:
    for function in (lambda: os.system(f"touch {mark}"), functools.partial(os.system, mark)):
        with pytest.raises(NotAllowed):
            rpc.rpc_sync("worker0", function)
    with pytest.raises(NotAllowed, match="top level of a module"):
        rpc.rpc_sync("worker0", lambda: 1)
    all_work()


# Attacks by what is sent


VALUES: dict[str, Callable[[str], Any]] = {
    "a pickle": attacks.Payload,
    "deep in it": lambda path: {"a": [1, (attacks.Payload(path),)]},
    "with a tensor": lambda path: (torch.ones(2), attacks.Payload(path)),
    "with a large one": lambda path: (torch.ones(1 << 19), attacks.Payload(path)),
    "with a reference": lambda path: (rpc.RRef(1), attacks.Payload(path)),
    "a function": lambda path: os.system,
    "an error": attacks.Bad,
    "a method": lambda path: Path(path).touch,
}


@pytest.mark.parametrize("kind", VALUES)
def test_arguments(group: Cluster, mark: str, kind: str) -> None:
    value = VALUES[kind](mark)
    with pytest.raises(NotAllowed) as caught:
        rpc.rpc_sync("worker0", functions.identity, args=(value,))
    assert caught.value.worker == "worker0"
    with pytest.raises(NotAllowed):
        rpc.remote("worker0", functions.identity, kwargs={"value": value}).to_here()
    all_work()


def test_results(group: Cluster, mark: str) -> None:
    with pytest.raises(NotAllowed) as caught:
        rpc.rpc_sync("worker0", attacks.give, args=(mark,))
    assert caught.value.worker == "driver"
    with pytest.raises(NotAllowed):
        rpc.remote("worker0", attacks.give, args=(mark,)).to_here()
    all_work()


def test_errors(group: Cluster, mark: str) -> None:
    with pytest.raises(ValueError, match="an error with something in it") as caught:
        rpc.rpc_sync("worker0", attacks.fail_with_payload, args=(mark,))
    assert not hasattr(caught.value, "payload")
    with pytest.raises(LookupError, match="at 0"):
        rpc.remote("worker0", functions.Accumulator).rpc_sync().fail()


# Methods


def test_methods_of_allowed_classes(group: Cluster) -> None:
    counter = rpc.remote("worker0", attacks.Counter, args=(1,))
    assert counter.rpc_sync().add(2) == 3
    assert counter.rpc_async().add(2).wait() == 5
    assert counter.remote().add(2).to_here() == 7
    assert counter.rpc_sync()(1) == 8
    assert counter.rpc_sync().__len__() == 8


# Programs


def test_a_program_trains_as_before(group: Cluster) -> None:
    losses, state = training.train_remotely("worker0", 4)
    assert losses == pytest.approx(training.train_locally(4))
    assert set(state) == set(attacks.Model().state_dict())


def test_what_programs_send(group: Cluster) -> None:
    model = attacks.Model()
    reference = rpc.RRef(model)
    sent = {"model": model, "optimizer": torch.optim.SGD, "references": [reference]}
    arrived = rpc.rpc_sync("worker0", functions.identity, args=(sent,))
    assert torch.equal(arrived["model"].layer.weight, model.layer.weight)
    assert arrived["references"][0].local_value() is model
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    scripted = functions.scripted_sum
    assert rpc.rpc_sync("worker0", scripted, args=(torch.ones(1), torch.ones(1))).item() == 3.0
    large = torch.arange(1 << 19)
    assert torch.equal(rpc.rpc_sync("worker0", functions.identity, args=([large],))[0], large)
    assert rpc.rpc_sync("worker0", functions.soon_through, args=("worker1", 3)) == 3
    assert rpc.rpc_sync("worker0", functions.add_by, args=("worker1", 1, 2)) == 3
    method = (functions.Accumulator.add, rpc.remote("worker0", functions.Accumulator), 2.0)
    assert rpc.rpc_sync("worker0", attacks.call_method, args=method) == 2.0
