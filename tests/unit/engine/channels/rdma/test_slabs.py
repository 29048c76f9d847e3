"""Registered memory: slabs of a warm pool that stay registered while the pool keeps them."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from tests.unit.engine.channels.fake_transport import FakeNetwork, FakeTransport
from torchweft.engine.channels.memory import BufferPool, Copier
from torchweft.engine.channels.rdma import SLAB, Staged, Way

COPIER = Copier()
KIB = 1024


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def way(network: FakeNetwork) -> Way:
    return Way(network.open_transport(), BufferPool(1 << 20))


def transport(network: FakeNetwork) -> FakeTransport:
    [made] = network.transports.values()
    return made


def random_bytes(size_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)


def slab_of(staged: Staged) -> int:
    """Returns the key of the slab, at the fake transport."""
    return int(json.loads(staged.content[SLAB.size :])[1])


def test_a_slab_that_came_back_is_registered_already(network: FakeNetwork, way: Way) -> None:
    first, second = way.stage(random_bytes(10), COPIER), way.stage(random_bytes(10), COPIER)
    assert (slab_of(first), slab_of(second)) == (1, 2)
    del first, second
    again = way.stage(random_bytes(10), COPIER)
    assert slab_of(again) in (1, 2)
    assert SLAB.unpack_from(again.content)[0] == 4 * KIB
    assert len(again.content) > SLAB.size
    assert network.registered == 2


def test_a_slab_that_may_be_read_is_not_used_again(network: FakeNetwork, way: Way) -> None:
    staged = way.stage(random_bytes(10), COPIER)
    memory = staged.memory()  # The peer asks for the bytes.
    before = bytes(memory)
    del staged
    for _ in range(3):
        way.stage(random_bytes(10), COPIER)
    assert bytes(memory) == before
    assert network.registered == 2


def test_a_received_buffer_keeps_its_slab_until_its_last_view_ends(
    network: FakeNetwork, way: Way
) -> None:
    memory, own = way.lease(5000)
    view = torch.frombuffer(memory, dtype=torch.uint8)[10:]
    del memory
    assert way.lease(5000)[1] is not own
    del view
    gc.collect()
    held = [way.lease(5000) for _ in range(2)]
    assert own in [each for _, each in held]
    assert network.registered == 2


def test_a_tensor_outlives_its_endpoint(network: FakeNetwork, way: Way) -> None:
    memory, own = way.lease(5000)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(7)
    transport(network).close()
    del memory, own, way
    gc.collect()
    assert bool((tensor == 7).all())
