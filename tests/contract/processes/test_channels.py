"""Tensors between processes over every channel for tensor memory."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def unusual_tensors() -> dict[str, torch.Tensor]:
    large = torch.arange(1 << 19, dtype=torch.float32).reshape(512, 1024)
    return {
        "transposed": large.t(),
        "strided": large[::3, 1::2],
        "expanded": torch.ones(1, 4).expand(1000, 4),
        "bfloat16": large.to(torch.bfloat16),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "complex": torch.complex(large, -large),
        "conjugate": torch.complex(large, large).conj(),
        "boolean": large > 5,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "channels last": torch.ones(8, 64, 32, 32).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("kind", unusual_tensors())
def test_tensors_of_every_kind(group: Cluster, kind: str) -> None:
    sent = unusual_tensors()[kind]
    back = rpc.rpc_sync("worker0", functions.identity, args=(sent,))
    assert back.dtype == sent.dtype
    assert back.shape == sent.shape
    assert torch.equal(back.to(torch.complex128), sent.to(torch.complex128))
    there = rpc.rpc_sync("worker0", functions.describe_tensor, args=(sent.real,))
    assert there == functions.describe_tensor(sent.real)


def test_sparse_tensors(group: Cluster) -> None:
    dense = torch.zeros(300, 300)
    dense[::7, ::5] = torch.rand(43, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "in beta state"
        compressed = dense.to_sparse_csr()
    for sent in (dense.to_sparse(), compressed):
        back = rpc.rpc_sync("worker0", functions.identity, args=(sent,))
        assert back.layout == sent.layout
        assert torch.equal(back.to_dense(), dense)


def test_parameters_and_modules(group: Cluster) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
    back = rpc.rpc_sync("worker0", functions.identity, args=(module,))
    assert back is not module
    for (name, ours), theirs in zip(module.named_parameters(), back.parameters(), strict=True):
        assert isinstance(theirs, torch.nn.Parameter), name
        assert theirs.requires_grad
        assert torch.equal(ours, theirs)
    tied = torch.nn.Parameter(torch.ones(3))
    pair = rpc.rpc_sync("worker0", functions.identity, args=([tied, tied],))
    assert pair[0] is pair[1]
