"""The maps between two workers: one direction alone, and tensors that no map has."""

from __future__ import annotations

import pytest
import torch

from torchweft.engine.protocol.registration import DeviceNames, Devices, Registration
from torchweft.engine.worker.peers import HOST, DeviceMaps, maps_between
from torchweft.errors import SerializationError

CUDA = [torch.device("cuda", index) for index in range(5)]


def worker(name: str, rank: int, **maps: DeviceNames) -> Registration:
    return Registration(name, rank, (), facts=Devices(maps, (), 5).as_facts())


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
