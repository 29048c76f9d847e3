from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.channels.fake_transport import FakeNetwork, FakeTransport
from torchweft import knobs
from torchweft.engine.channels.memory import Budget, BufferPool, Copier
from torchweft.engine.channels.rdma import SLAB, Slabs, Staged, TransportFailed

COPIER = Copier()
KIB = 1024


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(1 << 20)


@pytest.fixture
def budget() -> Budget:
    return Budget(64 * KIB)


@pytest.fixture(autouse=True)
def smallest() -> Iterator[None]:
    with knobs.RDMA_FROM_BYTES.override(3 * KIB):
        yield


@pytest.fixture
def sending(network: FakeNetwork, pool: BufferPool, budget: Budget) -> Slabs:
    return Slabs(network.open_endpoint(), pool.lease, budget)


@pytest.fixture
def receiving(network: FakeNetwork, pool: BufferPool, budget: Budget) -> Slabs:
    return Slabs(network.open_endpoint(), pool.lease, budget)


def transport(network: FakeNetwork) -> FakeTransport:
    [made] = network.transports.values()
    return made


def random_bytes(size_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)


def number_of(staged: Staged) -> int:
    return int(SLAB.unpack_from(staged.content)[0])


def test_sizes_are_powers_of_two(sending: Slabs) -> None:
    sizes = [1, 3 * KIB, 4 * KIB, 4 * KIB + 1, 16 * KIB]
    assert [sending.size_for(each) // KIB for each in sizes] == [4, 4, 4, 8, 16]


def test_a_copy_is_independent_of_its_buffer(sending: Slabs) -> None:
    buffer = random_bytes(5000)
    before = bytes(buffer.numpy())
    staged = sending.put(buffer, COPIER)
    assert staged is not None
    buffer.zero_()
    assert bytes(staged.kept) == before
    assert staged.size_bytes == 5000


def test_the_slab_that_came_back_last_is_used_next(network: FakeNetwork, sending: Slabs) -> None:
    first, second = sending.put(random_bytes(10), COPIER), sending.put(random_bytes(10), COPIER)
    assert first is not None
    assert second is not None
    numbers = number_of(first), number_of(second)
    assert numbers == (1, 2)
    del first, second
    again = sending.put(random_bytes(10), COPIER)
    assert again is not None
    assert number_of(again) == 2
    assert network.registered == 2


def test_a_slab_that_may_be_read_is_never_used_again(network: FakeNetwork, sending: Slabs) -> None:
    staged = sending.put(random_bytes(10), COPIER)
    assert staged is not None
    memory = staged.memory()  # The peer asks for the bytes.
    before = bytes(memory)
    del staged
    for _ in range(3):
        assert sending.put(random_bytes(10), COPIER) is not None
    assert bytes(memory) == before
    assert network.registered == 2


def test_every_handle_has_the_description_of_its_slab(sending: Slabs) -> None:
    for _ in range(2):
        staged = sending.put(random_bytes(10), COPIER)
        assert staged is not None
        assert SLAB.unpack_from(staged.content) == (1, 4 * KIB)
        assert len(staged.content) > SLAB.size
        del staged


def test_beyond_the_budget_larger_slabs_serve_or_none(budget: Budget, sending: Slabs) -> None:
    large = sending.put(random_bytes(60 * KIB), COPIER)
    assert budget.reserved_bytes == 64 * KIB
    assert sending.put(random_bytes(10), COPIER) is None
    del large
    assert sending.put(random_bytes(61 * KIB), COPIER) is not None
    small = sending.put(random_bytes(10), COPIER)
    assert small is not None
    assert number_of(small) == 1
    assert sending.put(random_bytes(65 * KIB), COPIER) is None


def test_a_slab_that_cannot_be_registered_is_not_counted(
    network: FakeNetwork, budget: Budget, sending: Slabs
) -> None:
    network.refuses.add("register")
    with pytest.raises(TransportFailed, match="cannot register"):
        sending.put(random_bytes(10), COPIER)
    assert budget.reserved_bytes == 0


def test_closing_frees_the_budget(budget: Budget, sending: Slabs) -> None:
    staged = sending.put(random_bytes(10), COPIER)
    sending.close()
    assert budget.reserved_bytes == 0
    del staged
    assert sending.put(random_bytes(10), COPIER) is None


def test_a_received_buffer_keeps_its_slab_until_its_last_view_ends(
    network: FakeNetwork, receiving: Slabs
) -> None:
    slab = receiving.take(5000)
    view = torch.frombuffer(receiving.lend(slab, 5000), dtype=torch.uint8)[10:]
    assert receiving.take(5000) is not slab
    del view
    gc.collect()
    assert receiving.take(5000) is slab
    assert network.registered == 2


def test_a_view_that_another_thread_settles_is_left_to_it(receiving: Slabs) -> None:
    """Both threads have seen that a view has ended."""

    class Taken(deque[object]):
        def __bool__(self) -> bool:
            return True

    receiving._lent.ended = Taken()
    assert receiving.take(KIB).size_bytes >= KIB


def test_slabs_beyond_the_budget_are_released_when_they_come_back(
    network: FakeNetwork, budget: Budget, receiving: Slabs
) -> None:
    slabs = [receiving.take(40 * KIB) for _ in range(3)]
    assert budget.reserved_bytes == 64 * KIB
    for slab in slabs:
        receiving.give_back(slab)
    assert budget.reserved_bytes == 64 * KIB
    assert network.registered == 1


def test_a_tensor_outlives_its_endpoint(network: FakeNetwork, receiving: Slabs) -> None:
    slab = receiving.take(5000)
    slab.memory[:] = 7
    tensor = torch.frombuffer(receiving.lend(slab, 5000), dtype=torch.uint8)
    del slab
    transport(network).close()
    receiving.close()
    assert bool((tensor == 7).all())
