"""Wrong arguments and callables give typed errors, strangers are refused; all workers go on."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from torchweft import rpc
from torchweft.errors import (
    AlreadyInitialized,
    ArgumentTypeError,
    ConfigurationError,
    SerializationError,
    UnknownFunction,
    UnknownWorker,
)
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")
STARTERS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


def assert_all_work() -> None:
    for name in ("worker0", "worker1", "driver"):
        assert rpc.rpc_sync(name, functions.name_here, timeout=5) == name


# Calls


@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("to", ["nobody", 3, -1, rpc.WorkerInfo("worker0", 2)])
def test_an_unknown_destination(group: Cluster, start: Any, to: Any) -> None:
    with pytest.raises(UnknownWorker) as caught:
        start(to, functions.name_here)
    assert repr(to) in str(caught.value)
    assert "'driver' (0), 'worker0' (1), 'worker1' (2)" in str(caught.value)
    assert isinstance(caught.value, (RuntimeError, ValueError))
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
@pytest.mark.parametrize("to", [None, 1.5, ["x"]])
def test_a_destination_of_a_wrong_type(group: Cluster, start: Any, to: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^to is .*pass the name of a worker"):
        start(to, functions.name_here)
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
def test_what_cannot_be_called(group: Cluster, start: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"func is 5, an int; pass the function itself"):
        start("worker0", 5)
    with pytest.raises(ConfigurationError, match=r"args=\(value,\)"):
        start("worker0", functions.identity, args=torch.ones(2))
    with pytest.raises(ConfigurationError, match="kwargs"):
        start("worker0", functions.identity, kwargs=[("value", 1)])
    assert_all_work()


@pytest.mark.parametrize("start", STARTERS)
def test_arguments_that_cannot_travel(group: Cluster, start: Any) -> None:
    argument = {"deep": [threading.Lock()]}
    with pytest.raises(SerializationError, match="lock") as caught:
        start("worker0", functions.identity, args=(argument,))
    assert "deep" in str(caught.value)
    assert_all_work()


def test_results_that_cannot_travel(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="lock"):
        rpc.rpc_sync("worker0", functions.make_lock)
    with pytest.raises(SerializationError, match="lock"):
        rpc.remote("worker0", functions.make_lock).to_here()
    assert_all_work()


def test_an_argument_that_cannot_be_rebuilt(group: Cluster) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        rpc.rpc_sync("worker0", functions.identity, args=(functions.Unreadable(),))
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        rpc.rpc_sync("worker0", functions.Unreadable)
    assert_all_work()


@pytest.fixture
def missing_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that no worker can import."""
    module = types.ModuleType("only_here")
    exec("def work(): return 1\nclass Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


def test_a_function_that_the_callee_lacks(
    group: Cluster, missing_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownFunction, match=r"'work' in module 'only_here'.*importable"):
        rpc.rpc_sync("worker0", missing_module.work)
    with pytest.raises(UnknownFunction, match="'Thing' in module 'only_here'"):
        rpc.rpc_sync("worker0", functions.identity, args=(missing_module.Thing(),))

    def added() -> None: ...

    added.__module__, added.__qualname__ = functions.__name__, "added"
    monkeypatch.setattr(functions, "added", added, raising=False)
    with pytest.raises(AttributeError, match=rf"'added' in module '{functions.__name__}'"):
        rpc.remote("worker0", added).to_here()
    assert_all_work()


def test_wrong_arguments_of_the_function(group: Cluster) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.rpc_sync("worker0", functions.add, args=(1,))
    with pytest.raises(TypeError, match="unexpected keyword"):
        rpc.rpc_async("worker0", functions.add, kwargs={"third": 1}).wait()
    assert_all_work()


def test_a_second_init(group: Cluster) -> None:
    with pytest.raises(AlreadyInitialized, match=r"is worker 'driver'.*shutdown\(\)"):
        rpc.init_rpc("again", rank=0, world_size=1)
    assert_all_work()


# Strangers


def test_a_worker_starts_no_cluster_of_its_own(group: Cluster) -> None:
    with pytest.raises(AlreadyInitialized, match="already initialized"):
        torchweft.cluster(workers=1).start()
    assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2.0
