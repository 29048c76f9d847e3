"""Functions by value: code is sent once to each life of a worker; the main program goes by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.errors import SerializationError
from torchweft.launch import Cluster

pytestmark = [pytest.mark.timeout(60), pytest.mark.keeps("threads", "descriptors")]
# A closed group


def test_functions_that_torch_compiles_can_be_called_again(group: Cluster) -> None:
    """What ``torch.compile`` has kept of the first call must not serve the second function."""
    number = torch.ones(2)

    def add(value: torch.Tensor) -> torch.Tensor:
        return value + number

    def compiled_there(value: torch.Tensor) -> torch.Tensor:
        return torch.compile(lambda value: add(value), backend="eager")(value)

    compiled_here = torch.compile(add, backend="eager")
    for call in range(1, 4):
        number = torch.full((2,), float(call))
        for function in (compiled_there, compiled_here, lambda value: compiled_here(value)):
            arrived = rpc.rpc_sync("worker0", function, args=(torch.zeros(2),))
            assert torch.equal(arrived, number)


def test_captured_references_are_handed_on(group: Cluster) -> None:
    def call(way: str) -> Any:
        kept = [rpc.remote(name, functions.identity, args=(name,)) for name in group.names]
        reference = kept[0]
        function = lambda: (reference.to_here(), kept[1].to_here())  # noqa: E731
        return getattr(rpc, way)("worker0", function)

    assert call("rpc_sync") == ("worker0", "worker1")
    assert call("rpc_async").wait() == ("worker0", "worker1")
    assert call("remote").to_here() == ("worker0", "worker1")


def test_a_function_that_refers_to_the_cluster_is_refused_by_name(group: Cluster) -> None:
    with pytest.raises(SerializationError, match=r"variable 'group'.* such as cluster\.names$"):
        rpc.rpc_sync("worker0", lambda: group.names)


def test_functions_are_passed_on_from_worker_to_worker(group: Cluster) -> None:
    number = 3
    for _ in range(2):
        names = ["worker0", "worker1", "driver", "worker1"]
        args = (names, lambda value: value + number, (1,))
        assert rpc.rpc_sync("worker0", functions.call_through, args=args) == 4
