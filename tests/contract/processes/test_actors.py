"""``rpc.actors``: objects on several workers that are called together."""

from __future__ import annotations

import pytest
import torch

from tests.contract.processes import generator_functions as functions
from tests.contract.processes.generator_functions import Counter
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def test_all_are_called_at_once_and_answer_in_order(group: Cluster) -> None:
    counters = rpc.actors(["worker0", "worker1", "worker0"], Counter, 10, step=2)
    assert counters.rpc_sync(Counter.where) == ["worker0", "worker1", "worker0"]
    assert counters.rpc_sync(Counter.add, times=3) == [16, 16, 16]
    assert counters[1].rpc_sync().add() == 18
    assert counters.rpc_sync(Counter.add) == [18, 20, 18]
    assert len(counters) == 3
    assert repr(counters) == "3 Counter on worker0, worker1, worker0"
    doubled = counters.rpc_sync(Counter.double, torch.ones(2))
    assert [each.tolist() for each in doubled] == [[2.0, 2.0]] * 3


def test_results_come_as_they_end(group: Cluster) -> None:
    rpc.rpc_sync("worker0", functions.forget)
    counters = rpc.actors(["worker0", "worker1"], Counter, 0)
    names = []
    for future in rpc.as_completed(counters.rpc_async(Counter.pass_gate)):
        names.append(future.wait())
        rpc.rpc_sync("worker0", functions.go_on)
    assert names == ["worker1", "worker0"]


def test_a_failure_and_mistakes(group: Cluster) -> None:
    counters = rpc.actors(["worker0", "worker1"], Counter, 7)
    with pytest.raises(LookupError, match="failed at 7"):
        counters.rpc_sync(Counter.fail)
    with pytest.raises(UnknownWorker):
        rpc.actors(["worker0", "nobody"], Counter, 7)
    with pytest.raises(ArgumentTypeError, match="pass several workers"):
        rpc.actors("worker0", Counter, 7)
    with pytest.raises(ArgumentTypeError, match="pass the class"):
        rpc.actors(["worker0"], 7)  # type: ignore[call-arg, arg-type]
    with pytest.raises(ArgumentTypeError, match=r"like Model\.loss"):
        counters.rpc_sync("add")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="place 2 of 2"):
        counters.replace(2)
