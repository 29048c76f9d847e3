"""Tests measurements of real models: exact bytes, plausible times, and no trace in the model."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, namedtuple
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


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_backward_passes_are_measured_in_any_context(context: Any) -> None:
    model, example = [nn.Linear(3, 3)], torch.randn(2, 3)
    with context():
        measured = profile(model, example, repeats=1)
    assert measured.layers[0].backward_seconds > 0
    assert measured.layers[0].saved_bytes == 24


# Saved activations


class SavesMuch(torch.autograd.Function):
    """Saves its input, a view of it, a view of a parameter, and a tensor of its own twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        own = torch.zeros(7)
        ctx.save_for_backward(x, x[:1], weight.t(), own, own[2:3])
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 5
        return gradients[0] * 2, None


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = SavesMuch.apply(x, self.weight)
        return out


def test_storages_count_once_and_parameters_never() -> None:
    [layer] = profile([Saving()], torch.randn(5, 2), repeats=1).layers
    assert layer.saved_bytes == 5 * 2 * 4 + 7 * 4


def test_a_view_holds_its_whole_storage_and_sends_its_elements() -> None:
    class FirstRow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1)[:1]

    [_, view, _] = profile(
        [nn.Linear(3, 3), FirstRow(), nn.Linear(3, 3)], torch.randn(4, 3), repeats=1
    ).layers
    assert view.activation_bytes == 1 * 3 * 4
    [one] = profile([nn.Sequential(FirstRow(), nn.Linear(3, 3))], torch.randn(4, 3)).layers
    assert one.saved_bytes == 4 * 3 * 4


def test_frozen_weights_are_fixed_and_need_no_saved_input() -> None:
    frozen = nn.Linear(3, 4).requires_grad_(False)
    [layer] = profile([frozen], torch.randn(2, 3), repeats=1).layers
    assert (layer.weight_bytes, layer.fixed_bytes) == (0, 4 * (12 + 4))
    assert (layer.saved_bytes, layer.backward_seconds) == (0, 0)


# What goes from layer to layer

Pair = namedtuple("Pair", ["tensor", "flag"])


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


def test_structures_are_one_argument() -> None:
    layers = [
        Recorder(lambda x, w: (x[0] * w, x[1])),
        Recorder(lambda x, w: {"a": x[0] * w, "mask": x[1], "none": None}),
        Recorder(lambda x, w: Pair([x["a"] * w], "text")),
        Recorder(lambda x, w: x.tensor[0] * w),
    ]
    example = torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    measured = profile(layers, example, repeats=1)
    assert measured.batch_size == 4
    assert bytes_of(measured, "activation_bytes") == [52, 52, 48, 48]
    first, second, third, fourth = (layer.seen for layer in layers)
    assert isinstance(first, tuple)
    assert [t.requires_grad for t in first] == [False, False]
    assert [t.requires_grad for t in second] == [True, False]
    assert third["a"].requires_grad
    assert third["none"] is None
    assert isinstance(fourth, Pair)
    assert fourth.flag == "text"
    assert example[0].grad is None


def test_an_activation_that_is_sent_twice_counts_once() -> None:
    last = Recorder(lambda x, w: x[0] * w)
    layers = [Recorder(lambda x, w: (y := x * w, y)), last]
    measured = profile(layers, torch.randn(4, 3), repeats=1)
    assert bytes_of(measured, "activation_bytes") == [48, 48]
    assert last.seen[0] is last.seen[1]


def test_layers_that_work_in_place_do_not_change_the_example() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    seen = Recorder(lambda x, w: x * w)
    example = torch.ones(2, 3)
    profile([Doubling(), nn.Identity(), Doubling(), seen], example, repeats=3)
    assert torch.equal(example, torch.ones(2, 3))
    assert torch.equal(seen.seen, torch.full((2, 3), 4.0))


def test_a_module_may_be_there_twice() -> None:
    relu = nn.ReLU()
    measured = profile(nn.Sequential(relu, nn.Linear(3, 3), relu), torch.randn(1, 3), repeats=1)
    assert [layer.name for layer in measured.layers] == ["0:ReLU", "1:Linear", "2:ReLU"]
    in_list = profile(nn.ModuleList([relu, relu]), torch.randn(1, 3), repeats=1)
    assert [layer.name for layer in in_list.layers] == ["0:ReLU", "1:ReLU"]


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


def test_no_repeats() -> None:
    with pytest.raises(PartitionError, match="repeats=0 must be 1 or more"):
        profile([nn.ReLU()], torch.ones(1), repeats=0)


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
