"""Cuts at named modules: what goes between the stages, and what cannot be cut."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.pipeline.stages_alone import compare, run, sent
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline import BATCH, CutError, SplitPoint, StageMismatch, Take, cut_model
from torchweft.pipeline.tracing import Operation, TracedStage, Value

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


class Model(nn.Module):
    """Two blocks around a function that a test passes."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = lambda model, x: x) -> None:
        super().__init__()
        self.before, self.after = Block(), Block()
        self.gain = nn.Parameter(torch.rand(3))
        self.between = between
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.between(self, self.before(x)))


def inputs(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


CUT = {"after": BEGINNING}


# What goes between the stages


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: Any = 1.0, flag: bool = True
    ) -> Tensor:
        x = self.b(self.a(x) * scale)
        if mask is not None:
            x = x * mask
        return x if flag else -x


def test_the_batch_has_the_form_of_the_examples() -> None:
    model, x = Inputs().double(), inputs()
    mask, scale = torch.ones(2, 3), torch.full((2, 1), 3.0, dtype=torch.float64)
    cut = {"b": BEGINNING}
    for args, kwargs, batch, takes in (
        ((x,), {}, x, ()),
        ((x, mask), {}, (x, mask), (Take(BATCH, 1),)),
        ((x, None), {}, (x, None), ()),
        ((x,), {"mask": mask}, {"x": x, "mask": mask}, (Take(BATCH, "mask"),)),
        ((x,), {"scale": scale, "flag": False}, {"x": x, "scale": scale}, ()),
        ((), {"x": x, "scale": 4.0}, {"x": x}, ()),
    ):
        stages = cut_model(model, cut, args, kwargs)
        assert stages.wiring.takes[1] == (Take(0, "mul"), *takes)
        compare(stages, model, batch, model(*args, **kwargs), mean_square)


# What a trace keeps


def test_sizes_and_random_numbers_are_made_anew_for_each_batch() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        rows, width = x.shape
        noise = torch.rand(3) + torch.randn(rows, width)
        causal = torch.zeros(rows, rows, dtype=x.dtype).masked_fill(
            torch.ones((rows, rows)).tril() == 0, torch.finfo(x.dtype).min
        )
        weights = (torch.arange(rows)[None] + causal).softmax(-1)
        return weights @ x * math_scale(width) + noise

    def math_scale(width: int) -> float:
        return width**-0.5

    model = Model(between)
    stages = cut_model(model, CUT, (inputs(2),))
    parts = sent(stages)
    found = []
    for rows in (2, 5):
        x = inputs(rows)
        torch.manual_seed(rows)
        expected = model(x)
        torch.manual_seed(rows)
        found.append(run(stages, parts, x))
        assert (found[-1] - expected).abs().max() < 1e-12
    assert (run(stages, parts, x) - found[-1]).abs().max() > 1e-3


def test_arguments_that_depend_on_the_mode_follow_it() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, model.training)
        return x * (2.0 if not model.training else 3.0)

    model = Model(between)
    for is_training in (True, False):
        parts = sent(stages := cut_model(model.train(is_training), CUT))
        assert model.before.training is is_training
        for mode in (True, False):
            for part in parts:
                part.train(mode)
            x = inputs(50)
            torch.manual_seed(0)
            expected = copy.deepcopy(model).train(mode)(x)
            torch.manual_seed(0)
            assert torch.equal(run(stages, parts, x), expected)


def test_values_are_released_after_their_last_use() -> None:
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        seen.append([each() is None for each in kept])
        kept.append(weakref.ref(y := x + 1))
        return y

    kept: list[Any] = []
    operations = [
        Operation("a", "function", note, (Value("x"),), {}, "here", ("x",)),
        Operation("b", "function", note, (Value("a"),), {}, "here", ("a",)),
        Operation("c", "function", note, (Value("b"),), {}, "here", ("b",)),
    ]
    TracedStage(["x"], operations, Value("c"), None)(torch.ones(2))
    assert seen == [[], [False], [True, False]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_an_error_of_a_stage_names_the_line_of_the_model() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        return x @ model.gain[:2]

    part = sent(cut_model(Model(between), CUT))[0]
    with pytest.raises(RuntimeError) as caught:
        part(inputs())
    assert any("return x @ model.gain[:2]" in note for note in caught.value.__notes__)


# What cannot be cut


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ({"befor": END}, "no module 'befor' to cut at; did you mean 'before'?"),
        ({"": END}, "no module ''"),
        ({"blocks": END}, r"does not call 'blocks'.* child of a ModuleList \('blocks.0'\)"),
        ({"twice": END}, "calls 'twice' 2 times"),
        ({"before": BEGINNING}, "'before' makes an empty stage: nothing is before it"),
        ({"after": END}, "'after' makes an empty stage: nothing is after it"),
        (
            {"before": END, "blocks.0": BEGINNING},
            "'blocks.0' .* the cut at 'before' is in the same",
        ),
    ],
)
def test_points_that_make_no_stages(cuts: Any, text: str) -> None:
    model = Model(lambda model, x: model.twice(model.twice(model.blocks[0](x))))
    model.blocks = nn.ModuleList([Block()])
    model.twice = nn.Tanh()
    with pytest.raises(CutError, match=text) as caught:
        cut_model(model, cuts)
    assert caught.value.module in cuts
    assert pickle.loads(pickle.dumps(caught.value)).module == caught.value.module


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (lambda model, x: x if x.sum() > 0 else -x, "control flow"),
        (lambda model, x: x * len(x), "'len' is not supported"),
        (lambda model, x: sum(x), "cannot be iterated"),
        (lambda model, x: torch.no_grad()(lambda: x * 2)(), "no_grad, inference_mode or autocast"),
        (lambda model, x: torch.autocast("cpu")(lambda: x * 2)(), "inference_mode or autocast"),
        (lambda model, x: nn.Linear(3, 3)(x), "not installed as a submodule"),
    ],
)
def test_code_that_cannot_be_traced_is_named(between: Any, text: str) -> None:
    model = nn.ModuleDict({"whole": Wrapper(Model(between))})["whole"]
    with pytest.raises(CutError, match=text) as caught:
        cut_model(model, {"inner.after": BEGINNING})
    assert caught.value.module == "inner"
    assert "test_points.py:" in caught.value.place
    assert "pass Pipe a list of stage modules" in str(caught.value)
    # The same code within a module that has no cut inside need not be traceable.
    assert len(cut_model(model, {"inner": END}).sources) == 2


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize(
    "between",
    [
        lambda model, x: x.add_(1),
        lambda model, x: nn.functional.relu(x, inplace=True),
        lambda model, x: model.relu(x),
    ],
)
def test_a_change_in_place_of_another_stage_s_value_is_refused(between: Any) -> None:
    model = Model(between)
    model.relu = nn.ReLU(inplace=True)
    with pytest.raises(CutError, match=r"stage 1 changes a value of stage 0 in place, at .*points"):
        cut_model(model, {"before": END})


def test_control_flow_that_no_trace_sees_is_found_with_an_example() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        return x if isinstance(x, Tensor) else x.mean(0, keepdim=True)  # type: ignore[unreachable]

    with pytest.raises(CutError, match=r"return float64\[1, 3\], and the model float64\[2, 3\]"):
        cut_model(Model(between), CUT, (inputs(),))


def test_a_normalization_of_two_stages_would_update_one_buffer() -> None:
    model = Model(lambda model, x: model.norm(x))
    model.norm = model.after.norm = nn.BatchNorm1d(3).double()
    model.after.forward = lambda x: model.norm(x)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="stages 0 and 1 share the running statistics"):
        cut_model(model, CUT)
    model.norm.eval()
    stages = cut_model(model, CUT)
    assert len(stages.ties) == 2


def test_a_model_of_other_operations_in_evaluation_is_cut_for_one_mode() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        return x.tanh() * 2 if model.training else x

    model = Model(between)
    parts = sent(stages := cut_model(model, CUT))
    x = inputs()
    assert torch.equal(run(stages, parts, x), model(x))
    parts[0].eval()
    with pytest.raises(CutError, match="does other operations in evaluation mode; cut it in eval"):
        run(stages, parts, x)
    model.eval()
    stages = cut_model(model, CUT)
    assert torch.equal(run(stages, sent(stages), x), model(x))


def test_examples_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match="cannot be called with these examples: too many"):
        cut_model(Model(), CUT, (inputs(), 1))
    with pytest.raises(StageMismatch, match=r"stage 0 cannot take float64\[3, 2\] from the batch"):
        cut_model(Model(), CUT, (inputs().T.contiguous(),))


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, *each: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.a(each[0]) + each[1]) * scale


def test_positional_arguments_without_names() -> None:
    model, x = Many().double(), inputs()
    stages = cut_model(model, {"b": BEGINNING}, (x, x))
    compare(stages, model, (x, x), model(x, x), mean_square)
    with pytest.raises(ConfigurationError, match="2 of the positional arguments have no name"):
        cut_model(model, {"b": BEGINNING}, (x, x), {"scale": 2.0})


def test_arguments_of_another_kind() -> None:
    with pytest.raises(ArgumentTypeError, match=r"the cut at 'after' is 'BEGINNING', a str"):
        cut_model(Model(), {"after": "BEGINNING"})  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError, match=r"the model is a Model; pass an nn.Sequential"):
        cut_model(Model(), 2)
    with pytest.raises(ArgumentTypeError, match="cuts is a list"):
        cut_model(Model(), ["after"])  # type: ignore[arg-type]
