"""Device maps: where tensors of calls, of answers and of backward passes arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import functions
from tests.gpu.device import only_gpu
from tests.gpu.members import Members
from torchweft import autograd, rpc
from torchweft.errors import ConfigurationError

pytestmark = only_gpu

CALLER, CALLEE = "caller", "callee"
GPU, HOST = "cuda:0", "cpu"


def with_map(device_map: dict[Any, Any], kind: Any = rpc.RpcBackendOptions) -> dict[str, Any]:
    return {CALLER: {"kind": kind, "device_maps": {CALLEE: device_map}}}


def ones(count: int, device: str) -> Tensor:
    return torch.ones(count, device=device)


def devices_of_calls(count: int, device: str) -> dict[str, str]:
    """Returns the devices on which a tensor arrives at the callee, and its results come back."""
    sent = ones(count, device)
    results = {
        "sync": rpc.rpc_sync(CALLEE, functions.added, (sent, 1)),
        "async": rpc.rpc_async(CALLEE, functions.added, (sent, 1)).wait(),
        "remote": rpc.remote(CALLEE, functions.added, (sent, 1)).to_here(),
    }
    for result in results.values():
        assert functions.bounds(result) == [2, 2]
    assert functions.bounds(sent) == [1, 1]
    there: str = rpc.rpc_sync(CALLEE, functions.device_of, (sent,))
    return {"there": there, **{way: str(result.device) for way, result in results.items()}}


def weight(device: str) -> Tensor:
    return torch.full((1 << 16,), 3.0, device=device, requires_grad=True)


def scaled(value: Tensor, other: rpc.RRef[Tensor]) -> Tensor:
    return value * other.local_value()


def gradient_there(context_id: int, leaf: rpc.RRef[Tensor]) -> tuple[str, list[float]]:
    found = autograd.get_gradients(context_id)[leaf.local_value()]
    return str(found.device), functions.bounds(found)


def devices_of_gradients(here: str, there: str) -> list[tuple[str, list[float]]]:
    """Returns the devices and the bounds of the gradients of a leaf here, and of a leaf there."""
    leaf = torch.full((1 << 16,), 2.0, device=here, requires_grad=True)
    other = rpc.remote(CALLEE, weight, (there,))
    with autograd.context() as context_id:
        result = rpc.rpc_sync(CALLEE, scaled, (leaf, other))
        assert str(result.device) == here
        autograd.backward(context_id, [(result * 5).sum()])
        mine = autograd.get_gradients(context_id)[leaf]
        theirs = rpc.rpc_sync(CALLEE, gradient_there, (context_id, other))
        return [(str(mine.device), functions.bounds(mine)), theirs]


NATIVE, OF_TORCH = rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions


@pytest.mark.parametrize(
    ("kind", "device_map", "here", "there"),
    [
        (NATIVE, {0: 0}, GPU, GPU),
        (NATIVE, {GPU: HOST}, GPU, HOST),
        (OF_TORCH, {GPU: HOST}, GPU, HOST),
        (NATIVE, {HOST: GPU}, HOST, GPU),
        (OF_TORCH, {HOST: HOST, GPU: GPU}, GPU, GPU),
    ],
    ids=["same", "to the host", "to the host, torch's", "from the host", "both, torch's"],
)
def test_tensors_arrive_by_the_map_and_return_by_its_inverse(
    members: Members, kind: Any, device_map: dict[Any, Any], here: str, there: str
) -> None:
    members.join(CALLER, CALLEE, options=with_map(device_map, kind))
    for count in (2, 1 << 17, 1 << 22):
        found = members.do(CALLER, devices_of_calls, count, here)
        assert found == {"there": there, "sync": here, "async": here, "remote": here}
    found = members.do(CALLER, devices_of_gradients, here, there)
    assert found == [(here, [15, 15]), (there, [10, 10])]


def test_the_callee_calls_back_by_its_own_map(members: Members) -> None:
    """Without a map of its own, its tensors arrive on the device of the same name."""
    members.join(CALLER, CALLEE, options=with_map({GPU: HOST}))
    sent = (CALLER, functions.device_of, ones, 1 << 17, GPU)
    assert members.do(CALLEE, functions.call_with, *sent) == GPU
    sent = (CALLEE, functions.device_of, ones, 1 << 17, GPU)
    assert members.do(CALLER, functions.call_with, *sent) == HOST


def test_a_map_that_names_a_device_that_the_callee_lacks(members: Members) -> None:
    """A worker that names no devices does not count its own, so the first call finds out."""
    members.join(CALLER, CALLEE, options=with_map({GPU: "cuda:77"}))
    for count in (2, 1 << 17):
        sent = (CALLEE, functions.bounds, ones, count, GPU)
        failure = members.do(CALLER, functions.failure_with, *sent)
        assert "SerializationError" in failure.types, failure
        assert "cuda:77" in failure.text
        assert CALLEE in failure.text
        sent = (CALLEE, functions.bounds, ones, count, HOST)
        assert members.do(CALLER, functions.call_with, *sent) == [1, 1]


def test_a_map_that_does_not_fit_is_refused_when_workers_join(members: Members) -> None:
    callee = {CALLEE: {"devices": [0]}}
    with pytest.raises(ConfigurationError, match="cuda:77"):
        members.join(CALLER, CALLEE, options={**with_map({GPU: "cuda:77"}), **callee})


def test_the_callee_has_no_gpu(members: Members) -> None:
    """A call with a tensor that cannot arrive fails, and the callee goes on."""
    members.join(CALLER, CALLEE, environment={CALLEE: {"CUDA_VISIBLE_DEVICES": ""}})
    for count in (2, 1 << 17, 1 << 22):
        sent = (CALLEE, functions.device_of, ones, count, GPU)
        failure = members.do(CALLER, functions.failure_with, *sent)
        assert "WeftError" in failure.types, failure
        assert GPU in failure.text, failure
        assert CALLEE in failure.text, failure
        sent = (CALLEE, functions.bounds, ones, count, HOST)
        assert members.do(CALLER, functions.call_with, *sent) == [1, 1]
    assert members.do(CALLER, functions.device_works) == [64, 64]
