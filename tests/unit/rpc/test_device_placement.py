"""Where tensors of calls, answers and gradients arrive, with CUDA devices that are faked.

A tensor is on the CPU all the time. The maps send it to a device whose index says which way it
went, and the receiver notes that device and stays on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from tests.unit.rpc.pair import Pair, pair_of
from torchweft import rpc
from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import enter
from torchweft.autograd.graph import roots_of
from torchweft.autograd.replay import Replay
from torchweft.engine.codec import tensors as tensor_tables
from torchweft.engine.codec.objects import pack
from torchweft.engine.worker import peers, tensor_messages
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import HOST, DeviceMaps, Peer
from torchweft.engine.worker.tensor_messages import LocalMessage, own_copy
from torchweft.errors import SerializationError
from torchweft.nn import owner

CALL, ANSWER, CALL_OF_CALLEE, ANSWER_OF_CALLER = 1, 4, 2, 3
"""The index of the faked device, by the map that a message followed."""

CUDA = [torch.device("cuda", index) for index in range(6)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


@pytest.fixture
def arrived(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Gives the pair maps, and returns the devices where tensors arrive; None for the CPU."""
    pair.peer.device_maps = DeviceMaps(
        "worker1", {HOST: CUDA[CALL]}, {CUDA[ANSWER_OF_CALLER]: HOST}
    )
    pair.peer_of_callee.device_maps = DeviceMaps(
        "worker0", {HOST: CUDA[CALL_OF_CALLEE]}, {CUDA[ANSWER]: HOST}
    )
    found: list[int | None] = []

    def device_of(code: int, index: int, worker: str) -> None:
        found.append(code % 256 if code >= 256 else None)

    monkeypatch.setattr(tensor_tables, "device_of", device_of)
    # Nothing is copied to these devices.
    monkeypatch.setattr(tensor_messages, "devices_of", lambda table, worker="": {})
    return found


def double(value: Any) -> Any:
    return value * 2


def triple(first: Tensor, second: Tensor) -> tuple[Tensor, int]:
    return first * 3 + second, 3


def same(value: Any) -> Any:
    return value


def test_calls_and_their_answers(pair: Pair, arrived: list[int | None]) -> None:
    assert torch.equal(pair.sync(double, torch.ones(2)), torch.full((2,), 2.0))
    assert arrived == [CALL, ANSWER]
    arrived.clear()
    assert torch.equal(pair.back(double, torch.ones(100_000)), torch.full((100_000,), 2.0))
    assert arrived == [CALL_OF_CALLEE, ANSWER_OF_CALLER]
    arrived.clear()
    assert pair.sync(double, 4) == 8
    assert arrived == []


# Gradients


@contextlib.contextmanager
def context_of(pair: Pair) -> Iterator[int]:
    context_id = pair.caller.engine.contexts.get_or_create(pair.caller.engine.contexts.new_id()).id
    try:
        with enter(context_id):
            yield context_id
    finally:
        pair.caller.engine.release(context_id)
        pair.callee.engine.release(context_id)


Way = Callable[..., Any]


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("is_back", [False, True], ids=["of the caller", "of the callee"])
def test_gradients_go_against_the_direction_of_their_message(
    pair: Pair, arrived: list[int | None], size: int, is_back: bool
) -> None:
    call, answer = (CALL_OF_CALLEE, ANSWER_OF_CALLER) if is_back else (CALL, ANSWER)
    leading = pair.callee if is_back else pair.caller
    leaf, other = torch.ones(size, requires_grad=True), torch.ones(size)
    with context_of(pair) as context_id:
        way: Way = pair.back if is_back else pair.sync
        result, _ = way(triple, leaf, other)
        assert arrived == [call, call, answer]
        arrived.clear()
        leading.engine.backward(context_id, [result.sum()])
        gradients = leading.engine.contexts.get(context_id).get_gradients()
    assert torch.equal(gradients[leaf], torch.full((size,), 3.0))
    # That of the answer goes like a call, that of the argument like an answer.
    assert arrived == [call, answer]


def cube(value: Tensor) -> Tensor:
    return value**3


def test_gradients_of_gradients(pair: Pair, arrived: list[int | None]) -> None:
    leaf = torch.full((3,), 2.0, requires_grad=True)
    with context_of(pair) as context_id:
        engine = pair.caller.engine
        # Squared, so that the gradient of the answer has a graph as well.
        result = (pair.sync(cube, leaf) ** 2).sum()
        mode = PassMode(retain_graph=True, create_graph=True, for_inputs=True)
        (first,) = Replay(engine, context_id, roots_of([result])).gradients_of([leaf], mode)
        assert first is not None
        arrived.clear()
        last = mode._replace(create_graph=False)
        (second,) = Replay(engine, context_id, roots_of([first.sum()])).gradients_of([leaf], last)
    assert second is not None
    assert torch.equal(second, torch.full((3,), 480.0))
    # Every message of the caller goes like a call, and every one of the callee like an answer.
    assert arrived
    assert set(arrived) == {CALL, ANSWER}


# Errors

LARGE = torch.ones(100_000)


@pytest.fixture
def _host_needs_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU a device like a GPU; small tensors, which stand in messages, still go."""
    monkeypatch.setattr(peers, "_UNMAPPED", ())


@pytest.mark.usefixtures("_host_needs_a_map")
def test_a_call_that_cannot_be_placed_is_not_sent(pair: Pair) -> None:
    pair.peer.device_maps = DeviceMaps("worker1", refuses_unmapped=True)
    pair.peer_of_callee.device_maps = peers.IDENTITY
    for way in (pair.sync, pair.start, pair.create):
        for _ in range(3):
            before = pair.caller.agent.traffic().bytes_sent
            with pytest.raises(
                RuntimeError,
                match="Request device mapping is not available for destination worker1",
            ):
                way(same, LARGE)
            # Another thread may send what belongs to the connection.
            assert pair.caller.agent.traffic().bytes_sent < before + LARGE.nbytes
    assert len(pair.caller.agent.calls) == 0
    assert pair.sync(double, 2) == 4
    pair.check_serves(2)


def large(count: int) -> Tensor:
    return torch.ones(count)


@pytest.mark.usefixtures("_host_needs_a_map")
def test_a_lost_gradient_is_an_error_of_the_pass(pair: Pair) -> None:
    leaf = torch.ones(100_000, requires_grad=True)
    with context_of(pair) as context_id:
        result = pair.sync(double, leaf).sum()
        pair.peer_of_callee.device_maps = DeviceMaps("worker0", refuses_unmapped=True)
        with pytest.raises(RuntimeError, match="device mapping is not available"):
            pair.caller.engine.backward(context_id, [result])


# Messages of a worker to itself


@pytest.mark.parametrize("keeps_graphs", [False, True])
@pytest.mark.parametrize("context_id", [0, 5])
def test_a_copy_on_another_device_is_like_one_on_the_same(
    context_id: int, keeps_graphs: bool
) -> None:
    for tensor in (
        torch.ones(2),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        nn.Parameter(torch.ones(2)),
    ):
        plain = own_copy(tensor, context_id, keeps_graphs)
        moved = own_copy(tensor, context_id, keeps_graphs, HOST)
        far = own_copy(tensor, context_id, keeps_graphs, torch.device("meta"))
        assert torch.equal(plain, moved)
        assert moved.data_ptr() != tensor.data_ptr()
        assert far.is_meta
        for each in (moved, far):
            assert each.requires_grad == plain.requires_grad
            assert each.is_leaf == plain.is_leaf
            assert isinstance(each, nn.Parameter) == isinstance(plain, nn.Parameter)


def own_message(*tensors: Tensor) -> LocalMessage:
    return LocalMessage(None, *pack(tensors, main_by_name=True))


def test_own_messages_follow_the_map_for_the_own_name(pair: Pair) -> None:
    worker = pair.caller
    leaf = torch.ones(2, requires_grad=True)
    computed = leaf * 2
    message = own_message(leaf, computed)
    assert worker.decoder.open_own(message, 5)[1] is computed
    worker.agent.me.device_maps = DeviceMaps(
        "worker0", {HOST: torch.device("meta")}, {HOST: torch.device("meta")}
    )
    placed = worker.decoder.open_own(message, 5)
    assert [each.is_meta for each in placed] == [True] * 2
    assert placed[0].grad_fn is not None
    assert placed[1].grad_fn.next_functions[0][0] is computed.grad_fn
    # The answer comes back, and what does not move is passed on as it is.
    back = worker.decoder.open_own(message, 5, is_answer=True)
    assert back[0] is leaf
    assert back[1] is computed


@contextlib.contextmanager
def alone(**options: Any) -> Iterator[Peer]:
    rpc.init_rpc(
        "me",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.RpcBackendOptions(store=HashStore(), **options),
    )
    try:
        yield current().me
    finally:
        rpc.shutdown()


@pytest.mark.usefixtures("_host_needs_a_map")
def test_a_worker_refuses_calls_to_itself_as_well() -> None:
    with alone(unmapped_devices="refuse"):
        with pytest.raises(SerializationError, match="Request device mapping is not available"):
            rpc.rpc_sync("me", same, args=(torch.ones(2),))
        with pytest.raises(SerializationError, match="Response device mapping is not available"):
            rpc.rpc_sync("me", large, args=(2,))
        assert rpc.rpc_sync("me", same, args=(3,)) == 3


# Modules on other workers


def result_of_module(device: str) -> Any:
    """Runs a module as ``RemoteModule`` does; ``cpu:0`` is not the name of the CPU there."""
    module = rpc.RRef(nn.Linear(2, 3))
    waiting = owner.run(*module.id, None, device, (), torch.ones(2))
    return waiting.then(waiting.owned.value)[1]


@pytest.mark.parametrize(
    ("maps", "device", "is_moved"),
    [
        (DeviceMaps("worker0", refuses_unmapped=True), "cpu:0", True),
        (DeviceMaps("worker0", refuses_unmapped=True), "cpu", False),
        (DeviceMaps("worker0", others={HOST: HOST}, refuses_unmapped=True), "cpu:0", False),
        (peers.IDENTITY, "cpu:0", False),
    ],
    ids=["without a map", "on the CPU", "with a map", "native"],
)
def test_the_result_of_a_module_comes_back_on_the_host_where_nothing_else_can(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, maps: DeviceMaps, device: str, is_moved: bool
) -> None:
    pair.peer_of_callee.device_maps = maps
    to_host, moved = owner._to_host, []

    def noted(value: Any) -> Any:
        moved.append(value)
        return to_host(value)

    monkeypatch.setattr(owner, "_to_host", noted)
    result = pair.sync(result_of_module, device)
    assert result.shape == (3,)
    assert bool(moved) == is_moved
    moved.clear()
    reference = pair.create(result_of_module, device)  # It stays where it is.
    assert pair.fetch(reference).shape == (3,)
    assert not moved
