"""States as flat memory, and the errors for states that differ."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from torchweft.errors import ArgumentTypeError
from torchweft.weights import WeightsMismatch
from torchweft.weights.layout import ALIGNMENT, check_same, check_shared, layout_of, tensors_of
from torchweft.weights.publisher import fill


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def version_of(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    layout = layout_of(tensors, dtype)
    memory = torch.full((layout.size_bytes,), 0xAB, dtype=torch.uint8)
    fill(layout, tensors, memory)
    views = layout.views(memory)
    covered = torch.zeros(layout.size_bytes, dtype=torch.bool)
    for entry in layout.entries.values():
        covered[entry.offset : entry.offset + entry.size_bytes] = True
    assert not memory[~covered].any(), "bytes without meaning are zero"
    return views


def test_a_version_has_the_values_of_the_state() -> None:
    tensors = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(24.0).view(4, 6).t()[::2],
        "flags": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j]),
        "half": torch.ones(3, dtype=torch.float16),
    }
    found = version_of(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 8 == 0 or not tensor.numel()


def test_tied_weights_have_one_place() -> None:
    model = Tied()
    layout = layout_of(tensors_of(model), None)
    entries = layout.entries
    assert entries["head.weight"] == entries["embedding.weight"]
    places = {entry.offset for entry in entries.values()}
    assert len(places) == len(entries) - 1
    assert all(place % ALIGNMENT == 0 for place in places)
    version_of(tensors_of(model))


def test_weights_that_are_no_longer_tied_are_refused() -> None:
    """One of them would be published under both names."""
    model = Tied()
    layout = layout_of(tensors_of(model), None)
    check_shared(layout, tensors_of(model), "the source")
    model.head.weight = nn.Parameter(model.head.weight.detach() + 1)
    with pytest.raises(WeightsMismatch, match=r"'embedding\.weight' and 'head\.weight' apart"):
        check_shared(layout, tensors_of(model), "the source")


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (lambda state: state.pop("b"), "b", "lacks 'b'"),
        (lambda state: state.update(c=torch.zeros(1)), "c", "has 'c', not published"),
        (lambda state: state.update(b=torch.zeros(2)), "b", r"'b' with shape \[2\], and \[3\]"),
        (lambda state: state.update(b=torch.zeros(3).half()), "b", "'b' in torch.float16"),
    ],
)
def test_a_state_that_differs_is_refused(change: object, name: str, text: str) -> None:
    state = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    layout = layout_of(state, None)
    other = dict(state)
    change(other)  # type: ignore[operator]
    with pytest.raises(WeightsMismatch, match=text) as caught:
        check_same(layout, other, None, "the state")
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (7, "int has no weights"),
        ({}, "no tensors"),
        ({"a": 3}, "'a' is int"),
        ({3: torch.zeros(1)}, "3 is Tensor"),
        ({"a": torch.zeros(3, device="meta")}, "'a' is a meta tensor"),
        ({"a": torch.zeros(3).to_sparse()}, "'a' is a sparse tensor"),
        ({"a": TwoTensor(torch.ones(3), torch.ones(3))}, "'a' is a TwoTensor, .* full_tensor"),
    ],
)
def test_what_has_no_dense_tensors_is_refused(source: object, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        tensors_of(source)  # type: ignore[arg-type]


class Event:
    """Stands for an event of CUDA; notes what is done with it."""

    steps: ClassVar[list[str]] = []

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits for a whole version sleeps"

    def record(self, stream: object) -> None:
        self.steps.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.steps.append("wait")


def test_a_version_is_complete_before_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from a GPU are enqueued together, and waited for once for each device."""
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.randn(5), "none": torch.zeros(0)}
    layout = layout_of(tensors, torch.bfloat16)
    memory = torch.full((layout.size_bytes,), 0xAB, dtype=torch.uint8)
    monkeypatch.setattr(Event, "steps", [])
    with monkeypatch.context() as all_on_a_gpu:
        all_on_a_gpu.setattr(Tensor, "is_cuda", True)
        all_on_a_gpu.setattr(torch.cuda, "Event", Event)
        all_on_a_gpu.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        fill(layout, tensors, memory)
    assert Event.steps == ["record on stream of cpu", "wait"]
    for name, view in layout.views(memory).items():
        assert torch.equal(view, tensors[name].to(torch.bfloat16))
