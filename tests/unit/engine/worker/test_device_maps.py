"""The maps between two workers: chains, inverses, and tensors that no map has."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.registration import DeviceNames, Devices, Registration
from torchweft.engine.worker.peers import HOST, IDENTITY, DeviceMaps, Members, maps_between
from torchweft.errors import SerializationError

CUDA = [torch.device("cuda", index) for index in range(5)]
ALL = [HOST, *CUDA]


@st.composite
def one_to_one(draw: st.DrawFn) -> dict[torch.device, torch.device]:
    here = draw(st.lists(st.sampled_from(ALL), unique=True))
    there = draw(st.permutations(ALL))
    return dict(zip(here, there, strict=False))


def worker(name: str, rank: int, **maps: DeviceNames) -> Registration:
    return Registration(name, rank, (), facts=Devices(maps, (), 5).as_facts())


def names_of(device_map: dict[torch.device, torch.device]) -> DeviceNames:
    return {str(here): str(there) for here, there in device_map.items()}


@settings(max_examples=examples(200))
@given(one_to_one(), one_to_one(), st.booleans())
def test_an_answer_arrives_where_its_call_came_from(
    map_a: dict[torch.device, torch.device], map_b: dict[torch.device, torch.device], refuses: bool
) -> None:
    a, b = worker("a", 0, b=names_of(map_a)), worker("b", 1, a=names_of(map_b))
    at_a = maps_between(a, b, refuses_unmapped=refuses)
    at_b = maps_between(b, a, refuses_unmapped=refuses)
    for here, there in map_a.items():
        assert at_a.forward(here) == there
        assert at_b.back(there) == here
    for here, there in map_b.items():
        assert at_b.forward(here) == there
        assert at_a.back(there) == here
    for device in set(CUDA) - map_a.keys():
        with pytest.raises(SerializationError):
            at_a.forward(device)
    for device in set(CUDA) - set(map_a.values()):
        with pytest.raises(SerializationError):
            at_b.back(device)
    assert at_a.moves_host_of_calls == at_a.moves_host(False) == (map_a.get(HOST, HOST) != HOST)
    assert at_b.moves_host_of_answers == at_b.moves_host(True) == (at_b.back(HOST) != HOST)


@settings(max_examples=examples(100))
@given(st.lists(st.permutations(CUDA), min_size=1, max_size=4))
def test_nested_calls_come_back_along_the_whole_chain(maps: list[list[torch.device]]) -> None:
    names = [f"worker{index}" for index in range(len(maps) + 1)]
    workers = [
        worker(name, rank, **{to: names_of(dict(zip(CUDA, devices, strict=True)))})
        for rank, (name, to, devices) in enumerate(zip(names, names[1:], maps, strict=False))
    ]
    workers.append(Registration(names[-1], len(maps), ()))
    for start in CUDA:
        device = start
        for caller, callee in itertools.pairwise(workers):
            device = maps_between(caller, callee).forward(device)
        for caller, callee in reversed(list(itertools.pairwise(workers))):
            device = maps_between(callee, caller).back(device)
        assert device == start


def test_without_maps_all_devices_stand_for_themselves() -> None:
    a, b = worker("a", 0, c={"cuda:0": "cuda:1"}), Registration("b", 1, ())
    assert maps_between(a, b) is IDENTITY
    assert IDENTITY.is_identity
    assert not IDENTITY.is_any
    assert not IDENTITY.answers_on_host
    assert not IDENTITY.moves_host_of_calls
    assert not IDENTITY.moves_host_of_answers
    for device in (*ALL, torch.device("meta"), torch.device("mps")):
        assert IDENTITY.forward(device) == IDENTITY.back(device) == device


def test_a_map_for_one_direction_leaves_the_other_free() -> None:
    a, b = worker("a", 0, b={"cuda:0": "cuda:1"}), Registration("b", 1, ())
    at_a, at_b = maps_between(a, b), maps_between(b, a)
    assert at_a.is_any
    assert at_b.is_any
    assert at_a.back(CUDA[3]) == at_b.forward(CUDA[3]) == CUDA[3]
    with pytest.raises(
        SerializationError,
        match="Request device mapping is not available for destination b: a tensor is on cuda:3, "
        r"and the device map for 'b' has cuda:0; .*add device cuda:3 to it \(device_maps\)",
    ):
        at_a.forward(CUDA[3])
    with pytest.raises(
        SerializationError,
        match="Response device mapping is not available for destination a: a tensor is on cuda:0, "
        "and the device map of worker 'a' for this worker has cuda:1",
    ):
        at_b.back(CUDA[0])


def test_a_worker_that_refuses_what_is_not_mapped() -> None:
    maps = DeviceMaps("b", refuses_unmapped=True)
    assert not maps.is_identity
    assert not maps.is_any
    assert maps.answers_on_host
    assert not DeviceMaps("b", others={}, refuses_unmapped=True).answers_on_host
    assert maps.forward(HOST) == maps.back(HOST) == HOST
    start = (
        "TensorPipe RPC backend only supports CPU tensors by default.*"
        "`set_device_map` on `TensorPipeRpcBackendOptions`"
    )
    for place, kind in ((maps.forward, "Request"), (maps.back, "Response")):
        pattern = f"{start}.*{kind} device mapping is not available for destination b"
        with pytest.raises(SerializationError, match=pattern) as caught:
            place(CUDA[0])
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.worker == "b"


def test_all_tensors_of_a_message_are_checked() -> None:
    maps = DeviceMaps("b", {HOST: HOST}, {}, refuses_unmapped=True)
    good, bad = torch.ones(1), torch.ones(1, device="meta")
    maps.check([good, bad], is_back=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torchweft.engine.worker.peers._UNMAPPED", ())
        maps.check([good], is_back=False)
        with pytest.raises(SerializationError, match="on meta"):
            maps.check([good, bad], is_back=False)
        with pytest.raises(SerializationError, match="Response"):
            maps.check([good], is_back=True)


def test_a_worker_knows_the_maps_between_itself_and_each_other() -> None:
    me = worker("me", 0, b={"cuda:0": "cuda:1"}, me={"cuda:2": "cuda:3"}, later={"cpu": "cuda:4"})
    others = [worker("b", 1, me={"cuda:4": "cuda:2"}), worker("c", 2)]
    group = Members(me, others, is_open=True)
    assert group.find("b").device_maps.forward(CUDA[0]) == CUDA[1]
    assert group.find("b").device_maps.back(CUDA[2]) == CUDA[4]
    assert group.find("c").device_maps is IDENTITY
    assert group.me.device_maps.forward(CUDA[2]) == CUDA[3]
    assert group.me.device_maps.back(CUDA[3]) == CUDA[2]
    joined, _ = group.join(worker("later", 3, me={"cuda:1": "cuda:1"}))
    assert joined.device_maps.forward(HOST) == CUDA[4]
    assert joined.device_maps.back(CUDA[1]) == CUDA[1]
    # Another life of the name has its own maps.
    again, _ = group.join(Registration("b", 5, (), later_rank=1))
    assert again.device_maps.forward(CUDA[0]) == CUDA[1]
    assert again.device_maps.back(CUDA[3]) == CUDA[3]


def test_a_group_may_refuse_what_is_not_mapped() -> None:
    group = Members(worker("me", 0), [worker("b", 1)], is_open=False, refuses_unmapped=True)
    for name in ("me", "b"):
        assert group.find(name).device_maps.answers_on_host
