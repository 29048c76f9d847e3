"""Tests measurements of real models: exact bytes, plausible times, and no trace in the model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.errors import ArgumentTypeError
from torchweft.pipeline.partition import PartitionError, Profile, profile, profiler


class Residual(nn.Module):
    """A block with normalisation, dropout and a connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.normalisation = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.normalisation(self.convolution(x))))


def residual_model() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 4, 3),
            act=nn.ReLU(inplace=True),
            block0=Residual(4),
            block1=Residual(4),
            flat=nn.Flatten(),
            head=nn.Linear(4 * 6 * 6, 5),
        )
    )


def bytes_of(measured: Profile, field: str) -> list[int]:
    return [getattr(layer, field) for layer in measured.layers]


# A real model


def test_a_model_with_residual_blocks() -> None:
    model, example = residual_model(), torch.randn(2, 3, 8, 8)
    measured = profile(model, example, repeats=1, optimizer_ratio=2.0)
    assert measured.batch_size == 2
    assert [layer.name for layer in measured.layers] == (
        "stem:Conv2d act:ReLU block0:Residual block1:Residual flat:Flatten head:Linear".split()
    )
    image = 2 * 4 * 6 * 6 * 4
    assert bytes_of(measured, "activation_bytes") == [image] * 5 + [2 * 5 * 4]
    stem, block, head = 4 * (4 * 27 + 4), 4 * (4 * 36 + 4 + 8), 4 * (5 * 144 + 5)
    assert bytes_of(measured, "weight_bytes") == [stem, 0, block, block, 0, head]
    buffers = 4 * (4 + 4) + 8  # mean and variance of each channel, and a count
    assert bytes_of(measured, "fixed_bytes") == [0, 0, buffers, buffers, 0, 0]
    saved = bytes_of(measured, "saved_bytes")
    assert saved[:2] == [2 * 3 * 8 * 8 * 4, image]
    # At least the inputs of convolution, normalisation and relu, which are three tensors.
    assert saved[2] == saved[3] >= 3 * image
    assert saved[4:] == [0, image]
    assert all(layer.forward_seconds > 0 for layer in measured.layers)
    assert all(layer.backward_seconds > 0 for layer in measured.layers)
    assert {layer.optimizer_ratio for layer in measured.layers} == {2.0}


def test_profiling_leaves_no_trace() -> None:
    model, example = residual_model(), torch.randn(2, 3, 8, 8, requires_grad=True)
    model(example).sum().backward()  # statistics and gradients that are not those of a new model
    model.get_submodule("block1.normalisation").eval()
    model.get_parameter("stem.bias").requires_grad_(False)
    steps: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(steps.append)
    before = trace_of(model, example)
    profile(model, example, repeats=2)
    after = trace_of(model, example)
    assert before[0] == after[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert steps == []


def trace_of(model: nn.Module, example: Tensor) -> tuple[Any, list[Tensor]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "example": example}
    names = [(name, id(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    gradients = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
    modes = [module.training for module in model.modules()]
    identities = names, [id(gradient) for gradient in gradients], modes
    values = [*tensors.values(), *gradients, torch.get_rng_state()]
    return identities, [value.detach().clone() for value in values]


def test_a_failing_layer_leaves_no_trace_either() -> None:
    model = nn.Sequential(Residual(3), Toggling(), nn.Linear(1, 1))
    mean = model.get_buffer("0.normalisation.running_mean")
    with pytest.raises(RuntimeError, match="shapes"):
        profile(model, torch.randn(2, 3, 4, 4))
    assert torch.equal(mean, torch.zeros(3))
    assert model.get_buffer("0.normalisation.running_mean") is mean
    assert model[1].training
    assert model[1].count == torch.zeros(1)


class Toggling(nn.Module):
    """Replaces a buffer, and changes its own mode."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.eval()
        return x


# What goes from layer to layer


class Recorder(nn.Module):
    """Passes a structure on, and notes which of its tensors require a gradient."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: Any = None

    def forward(self, *arguments: Any) -> Any:
        [self.seen] = arguments
        return self.make(self.seen, self.weight)


def test_layers_that_work_in_place_do_not_change_the_example() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    seen = Recorder(lambda x, w: x * w)
    example = torch.ones(2, 3)
    profile([Doubling(), nn.Identity(), Doubling(), seen], example, repeats=3)
    assert torch.equal(example, torch.ones(2, 3))
    assert torch.equal(seen.seen, torch.full((2, 3), 4.0))


# Times


def test_the_median_of_the_runs_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: clock.now)
    layer = Slow(clock, [1000, 1000, 5, 1, 4, 30, 3])
    [measured] = profile([layer], torch.randn(2, requires_grad=True), repeats=5).layers
    assert measured.forward_seconds == 4
    assert measured.backward_seconds == 8
    assert layer.runs == 7


class Clock:
    now = 0.0


class Slow(nn.Module):
    """Takes a given time in each run, and twice that in the backward pass."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        super().__init__()
        self.clock, self.seconds, self.runs = clock, seconds, 0

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds[self.runs]
        self.runs += 1
        self.clock.now += seconds
        out = x * 1

        def later(gradient: Tensor) -> None:
            self.clock.now += 2 * seconds

        out.register_hook(later)
        return out


# Mistakes


@pytest.mark.parametrize(
    ("model", "example", "error", "message"),
    [
        (nn.Sequential(), torch.ones(1), PartitionError, "the model has no layers"),
        ([], torch.ones(1), PartitionError, "the model has no layers"),
        (nn.Linear(1, 1), torch.ones(1), ArgumentTypeError, "model is a Linear; pass an nn.Seq"),
        ([nn.ReLU(), torch.relu], torch.ones(1), ArgumentTypeError, "layer 1 is a builtin"),
        ([nn.ReLU()], {"a": [1]}, ArgumentTypeError, "example is a dict; pass a tensor"),
        ([nn.LazyLinear(3)], torch.ones(1), PartitionError, "layer 0:LazyLinear has lazy param"),
    ],
)
def test_mistakes_are_named(model: Any, example: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        profile(model, example)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu() -> None:
    model, example = residual_model().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    before = torch.cuda.get_rng_state()
    on_gpu = profile(model, example, repeats=2)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(layer.forward_seconds > 0 for layer in on_gpu.layers)
    assert all(layer.backward_seconds > 0 for layer in on_gpu.layers if layer.weight_bytes)
    on_cpu = profile(residual_model(), example.cpu(), repeats=1)
    for field in ("activation_bytes", "weight_bytes", "fixed_bytes"):
        assert bytes_of(on_gpu, field) == bytes_of(on_cpu, field)
