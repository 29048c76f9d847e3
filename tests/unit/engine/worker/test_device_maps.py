"""The maps between two workers: chains, inverses, and tensors that no map has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.registration import DeviceNames, Devices, Registration
from torchweft.engine.worker.peers import HOST, DeviceMaps, maps_between
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
