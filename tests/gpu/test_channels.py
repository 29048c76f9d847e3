"""The way of tensors between GPUs: from device to device, or through memory of the host."""

from __future__ import annotations

import itertools

from tests.gpu import functions
from tests.gpu.device import only_gpu
from tests.gpu.members import Members
from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.launch import Cluster

pytestmark = only_gpu

HOST_ONLY = {"": {"WEFT_CUDA_IPC": "0"}}
COUNTS = (2, 1 << 12, 1 << 18, 1 << 23)


def obstacle(peer: str) -> str:
    """Returns why tensors to a peer do not go from device to device; nothing if they do."""
    return current().find(peer).ways.obstacles()["cuda_ipc"]


def test_tensors_go_from_device_to_device_on_one_host(group: Cluster) -> None:
    everybody = (group.name, *group.names)
    for first, second in itertools.permutations(everybody, 2):
        sent = (second, functions.bounds, functions.late, 3.0, 1 << 20)
        assert rpc.rpc_sync(first, functions.call_with, sent) == [3, 3]
    for first, second in itertools.permutations(everybody, 2):
        assert rpc.rpc_sync(first, obstacle, (second,)) == "", (first, second)


def test_through_memory_of_the_host_they_arrive_as_well(members: Members) -> None:
    members.join("first", "second", environment=HOST_ONLY)
    for first, second in (("first", "second"), ("second", "first")):
        assert members.do(first, functions.differences_at, second) == []
        for number, count in enumerate(COUNTS):
            late = (functions.late, number + 0.5, count)
            wanted = [number + 0.5, number + 0.5]
            assert members.do(first, functions.bounds_through, second, *late) == wanted
            sent = (second, functions.bounds, *late)
            assert members.do(first, functions.call_with, *sent) == wanted
        assert members.do(first, obstacle, second) != ""
