"""Tensors that stand in their message arrive as they do by tables, wherever they are in a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from torchweft import rpc
from torchweft.errors import SerializationError
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def facts(value: Any) -> Any:
    """Returns the properties of the tensors in a value; of other values, themselves."""
    if isinstance(value, Tensor):
        return {
            "class": type(value).__name__,
            "is parameter": isinstance(value, Parameter),
            "dtype": str(value.dtype),
            "graph": [value.requires_grad, value.is_leaf],
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "values": value.detach().tolist(),
        }
    if isinstance(value, dict):
        return {key: facts(each) for key, each in value.items()}
    return [facts(each) for each in value] if isinstance(value, (list, tuple)) else value


def facts_of(*args: Any, **kwargs: Any) -> Any:
    return facts([*args, kwargs])


def tensors() -> dict[str, Tensor]:
    leaf = torch.ones(2, requires_grad=True)
    table = torch.arange(12.0).reshape(3, 4)
    return {
        "plain": torch.arange(3),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(4, dtype=torch.uint8),
        "transposed": table.t(),
        "strided": table.clone()[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "leaf": leaf,
        "computed": leaf * 2,
        "computed and strided": (leaf * 3).expand(2, 2).t(),
        "parameter": Parameter(torch.ones(2, 3).t()),
        "frozen parameter": Parameter(torch.ones(2), requires_grad=False),
        "integer parameter": Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    }


def test_each_is_what_was_sent(group: Cluster) -> None:
    for name, tensor in tensors().items():
        [found, _] = rpc.rpc_sync("worker0", facts_of, (tensor.detach(),))
        assert found == facts(tensor.detach()), name
        [found, _] = rpc.rpc_sync("worker0", facts_of, (tensor,))
        assert found["is parameter"] == isinstance(tensor, Parameter), name
        assert found["graph"][0] == tensor.requires_grad, name


def test_the_callee_may_change_them(group: Cluster) -> None:
    for tensor in (torch.ones(3), torch.ones(2, 3).t()):
        assert rpc.rpc_sync("worker0", add_one, (tensor,)).tolist() == (tensor + 1).tolist()
        assert bool((tensor == 1).all())


def add_one(tensor: Tensor) -> Tensor:
    return tensor.add_(1)


@pytest.mark.parametrize("count", [2, 1 << 15])
def test_a_tensor_with_a_tangent_is_refused(group: Cluster, count: int) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(count), torch.ones(count))
        for function in (torch.sin, lambda tensor: tensor):
            with pytest.raises(SerializationError, match="has a tangent"):
                rpc.rpc_sync("worker0", function, args=(dual,))
        assert rpc.rpc_sync("worker0", torch.sin, args=(torch.zeros(count),)).sum() == 0
