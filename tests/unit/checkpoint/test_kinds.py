from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.tables import cases
from tests.unit.checkpoint.encoded import encoded, saved
from torchweft.checkpoint import files, kinds
from torchweft.checkpoint.kinds import (
    DATA,
    GENERATOR,
    MODULE,
    OBJECT,
    TENSOR,
    VALUE,
    Differences,
)
from torchweft.errors import ArgumentTypeError


def differences(path: str, kind: str, value: Any, state: Any, saved: str = "") -> Differences:
    return kinds.differences(path, kind, value, {"kind": saved or kind, "state": state})


def scheduler() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])


def test_others_come_back_as_the_same_objects() -> None:
    steps, tensor, generator = scheduler(), torch.ones(2, requires_grad=True), torch.Generator()
    numbers, words = [1, 2], {"a": 1}
    values = [
        (OBJECT, steps),
        (TENSOR, tensor),
        (GENERATOR, generator),
        (DATA, numbers),
        (DATA, words),
    ]
    states = [saved(kind, value) for kind, value in values]
    drawn = torch.rand((), generator=generator)
    steps.milestones.clear()
    with torch.no_grad():
        tensor.zero_()
    numbers.append(3)
    words["b"] = 2
    for (kind, value), state in zip(values, states, strict=True):
        assert differences("x", kind, value, state) == ([], [], [])
        kinds.put(kind, value, state, strict=True)
    assert sorted(steps.milestones) == [2, 3]
    assert tensor.tolist() == [1.0, 1.0]
    assert torch.rand((), generator=generator) == drawn
    assert (numbers, words) == ([1, 2], {"a": 1})


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


@cases(
    ("make", "text"),
    [
        (lambda: torch.empty(2, device="meta"), "a tensor on the device 'meta'"),
        (lambda: nn.LazyLinear(2).weight, "a parameter of a lazy module.* call the module once"),
        (lambda: nested(torch.jagged), "a nested tensor.* save its parts"),
        (lambda: nested(torch.strided), "a nested tensor.* save its parts"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "a TwoTensor, which has no memory"),
        (fake, "a FakeTensor, which has no memory"),
    ],
)
def test_a_tensor_that_could_not_be_read_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^x\[0\] is {text}"):
        saved(DATA, [make()])


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def test_differences_are_named() -> None:
    state = saved(MODULE, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    other = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 4), nn.Linear(1, 1))
    found = differences("a", MODULE, other, state)
    assert found.missing == ["a:2.weight", "a:2.bias"]
    assert found.unexpected == ["a:0.bias"]
    assert found.differing == [
        "a:1.weight has shape (3, 2) in the snapshot and (4, 2) here",
        "a:1.bias has shape (3,) in the snapshot and (4,) here",
    ]
    shapes = differences("t", TENSOR, torch.ones(2), torch.ones(3))
    assert shapes.differing == ["t has shape (3,) in the snapshot and (2,) here"]


def test_another_kind_is_named_and_a_tensor_takes_the_place_of_a_plain_value() -> None:
    found = differences("x", MODULE, nn.Linear(1, 1), torch.ones(1), TENSOR)
    assert found.differing == ["x is a tensor in the snapshot and a module here"]
    assert not any(differences("x", VALUE, 1.5, torch.ones(1), TENSOR))
    found = differences("x", TENSOR, torch.ones(1), [torch.ones(1), (torch.ones(1),)], VALUE)
    assert found.unexpected == ["x/0", "x/1/0"]
    assert differences("x", TENSOR, torch.ones(1), [1.0], VALUE).differing


def test_tensors_in_plain_values_are_compared_and_written_in_place() -> None:
    kept, other = torch.zeros(2), torch.zeros(3)
    value: dict[str, Any] = {"a": [kept], "b": {"c": other}, "d": 1}
    saved: dict[str, Any] = {"a": [torch.ones(2), torch.ones(1)], "b": {}, "d": 2}
    found = differences("x", VALUE, value, saved)
    assert found == (["x/b/c"], [], [])
    wrong = {"a": [torch.ones(3)], "b": {"c": torch.ones(3, dtype=torch.int64)}}
    assert differences("x", VALUE, value, wrong).differing == [
        "x/a/0 has shape (3,) in the snapshot and (2,) here",
        "x/b/c has type torch.int64 in the snapshot and torch.float32 here",
    ]
    kinds.put(VALUE, value, {**saved, "b": {"c": torch.ones(3)}}, strict=True)
    assert value["a"][0] is kept
    assert value["b"]["c"] is other
    assert kept.tolist() == [1.0, 1.0]
    assert (len(value["a"]), value["d"]) == (2, 2)


# Devices


def test_tensors_of_data_go_to_the_devices_of_those_that_they_replace() -> None:
    present: dict[str, Any] = {
        "a": torch.ones(2, device="meta"),
        "b": [torch.ones(1), torch.ones(1, device="meta")],
        "c": ({"d": torch.ones(1, device="meta")}, 3),
        "gone": torch.ones(1),
    }
    saved = {
        "a": torch.zeros(2),
        "b": [torch.zeros(1), torch.zeros(1), torch.zeros(1)],
        "c": ({"d": torch.zeros(1)}, 4),
        "new": torch.zeros(1),
    }
    kept = present
    kinds.put(DATA, present, saved, strict=True)
    assert present is kept
    assert list(present) == ["a", "b", "c", "new"]
    assert present["a"].device.type == "meta"
    assert [tensor.device.type for tensor in present["b"]] == ["cpu", "meta", "cpu"]
    assert present["c"][0]["d"].device.type == "meta"
    assert present["c"][1] == 4
    assert present["new"].device.type == "cpu"


class Generators:
    """Stands for the generators of two GPUs, of which this process uses the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
        for name, value in {
            "is_initialized": lambda: True,
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_rng_state": self.states.__getitem__,
            "set_rng_state": lambda state, device: self.states.__setitem__(device, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False
        )


def test_generators_of_gpus_in_use_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch)
    states = kinds.take_random()
    assert states["cuda"][0] is None
    assert states["cuda"][1][0] == 1
    generators.states[:] = [torch.zeros(16, dtype=torch.uint8)] * 2
    kinds.put_random(states)
    assert [int(state[0]) for state in generators.states] == [0, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_states_of_gpus_that_are_not_there_are_left_out(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with monkeypatch.context() as two:
        Generators(two)
        states = kinds.take_random()
    generators = Generators(monkeypatch, count)
    kinds.put_random(states)
    assert [int(state[0]) for state in generators.states] == list(range(count))


# Random number generators


def draw() -> tuple[float, ...]:
    # Normal numbers are drawn in pairs; the generator keeps the second one for the next call.
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.normal()),
        float(torch.rand(())),
        float(torch.randn(3).sum()),
    )


def test_all_generators_go_on_from_where_they_were_also_through_a_file(tmp_path: Path) -> None:
    draw()
    states = kinds.take_random()
    drawn = [draw() for _ in range(3)]
    path = str(tmp_path / "part")
    files.write_part(path, encoded({"/random/a": {"kind": "random state", "state": states}}))
    for kept in (states, files.read_part(path, ["/random/a"])["/random/a"]["state"]):
        kinds.put_random(kept)
        assert [draw() for _ in range(3)] == drawn
    assert draw() not in drawn
