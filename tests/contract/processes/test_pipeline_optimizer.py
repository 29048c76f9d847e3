"""The optimizer of a pipeline on real workers: what ``torch.optim`` promises, it keeps."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import torchweft
from tests.contract.processes.pipeline_models import WIDTH, layers
from torchweft.errors import ArgumentTypeError, ConfigurationError, OptimizerError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    SchedulePipeDream,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    broadcast,
    cut_sequential,
)
from torchweft.pipeline.elastic import ElasticPipe

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1"]
TINY = 1e-12
mse = nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


class Merged(nn.Module):
    """A map by the sum of two weights, beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.delta = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 4)
        self.shift = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.base + self.delta) + self.shift)


def merged(count: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[Merged() for _ in range(count)])


def batch(seed: int, width_in: int = 4, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, width_in, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(16, width, generator=generator, dtype=torch.float64)


def worst(found: dict[str, Any], model: nn.Module) -> float:
    """Returns the largest difference between gradients and those of a model in this process."""
    return max(
        float((found[name] - weight.grad).abs().max()) for name, weight in model.named_parameters()
    )


def assert_same(pipe: Pipe, model: nn.Module, bound: float = TINY) -> None:
    for name, value in pipe.state_dict().items():
        assert float((value - model.state_dict()[name]).abs().max()) <= bound, name


SPLIT: list[Any] = [
    ScheduleZBH1(1),
    ScheduleZBH1(4),
    ScheduleInterleavedZeroBubble(4),
    ScheduleZBVZeroBubble(4),
    ScheduleDualPipeV(4),
]


@pytest.mark.parametrize("schedule", SPLIT, ids=lambda each: type(each).__name__)
def test_weights_that_are_added_before_use_have_gradients_of_their_own(schedule: Any) -> None:
    model = merged(4)
    alone = copy.deepcopy(model)
    given = batch(0, 8, 8)
    mse(alone(given[0]), given[1]).backward()
    with Pipe(model, WORKERS, schedule, mse) as pipe:
        pipe.step(*given)
        assert worst(pipe.gradients(), alone) < TINY
        for norm_type in (2.0, 1.0, math.inf):
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type)
            assert pipe.clip_grad_norm_(0.01, norm_type).item() == pytest.approx(norm.item())
            assert worst(pipe.gradients(), alone) < TINY


class Hooked(Merged):
    """Has hooks on its weights, on their sum and on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        for weight in (self.base, self.shift):
            weight.register_hook(lambda gradient: 2 * gradient)
            weight.register_post_accumulate_grad_hook(self._count)

    def _count(self, weight: Tensor) -> None:
        self.seen[0 if weight is self.base else 1] += 1

    def forward(self, x: Tensor) -> Tensor:
        both = self.base + self.delta
        hidden = torch.tanh(x @ both + self.shift)
        if hidden.requires_grad:
            both.register_hook(lambda gradient: 3 * gradient)
            hidden.register_hook(lambda gradient: gradient / 2)
        return x + hidden


def hooked() -> nn.Module:
    torch.manual_seed(3)
    return Hooked()


@pytest.mark.parametrize("schedule", [Schedule1F1B(4), *SPLIT[1:2], *SPLIT[4:]])
def test_hooks_of_weights_run_once_for_each_microbatch(schedule: Any) -> None:
    count = len(schedule.table(2).seats) // schedule.table(2).n_microbatches
    alone = nn.Sequential(*[hooked() for _ in range(count)])
    given = batch(0, 8, 8)
    parts = zip(given[0].chunk(4), given[1].chunk(4), strict=True)
    for inputs, target in parts:
        (mse(alone(inputs), target) / 4).backward()
    with Pipe([hooked] * count, WORKERS, schedule, mse) as pipe:
        pipe.step(*given)
        found = pipe.gradients()
        state = pipe.state_dict()
    for number, module in enumerate(alone):
        for name, weight in module.named_parameters():
            assert torch.allclose(found[f"{number}.{name}"], weight.grad, atol=TINY), name
        assert torch.equal(state[f"{number}.seen"], module.seen), number


SHARED: list[tuple[Any, int]] = [
    (Schedule1F1B(4), 2),
    (ScheduleGPipe(4, replicas=(2, 1)), 3),
    (ScheduleGPipe(4, replicas=(1, 2)), 3),
    (ScheduleZBVZeroBubble(4), 2),
]


def tied() -> nn.Sequential:
    model = layers(6)
    first, last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    last.weight = first.weight
    return nn.Sequential(model[0], first, *model[1:], last)


@pytest.mark.parametrize(("schedule", "count"), SHARED)
@pytest.mark.parametrize("build", [lambda: layers(5), tied], ids=["chain", "tied"])
def test_gradients_of_several_steps_add_up(
    schedule: Any, count: int, build: Callable[[], nn.Sequential]
) -> None:
    """Also those of weights that exist more than once."""
    model = build()
    alone = copy.deepcopy(model)
    names = ["worker0", "worker1", "worker2"][:count]
    with Pipe(model, names, schedule, mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        own = torch.optim.SGD(alone.parameters(), lr=0.1)
        for set_to_none in (True, False):
            for seed in range(3):
                pipe.step(*batch(seed))
                inputs, target = batch(seed)
                mse(alone(inputs), target).backward()
            assert worst(pipe.gradients(), alone) < TINY
            optimizer.step()
            own.step()
            optimizer.zero_grad(set_to_none)
            own.zero_grad(set_to_none)
        assert_same(pipe, alone)


def in_two_groups(weights: Any, lr: float, make: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Matrices decay; biases and norms do not, and learn more slowly."""
    weights = list(weights)
    optimizer: torch.optim.Optimizer = make(
        [
            {"params": [each for each in weights if each.dim() > 1], "weight_decay": 0.5},
            {"params": [each for each in weights if each.dim() == 1], "lr": lr / 10},
        ],
        lr=lr,
        weight_decay=0.0,
    )
    return optimizer


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n, lambda n: 0.9**n]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.1], total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_each_group_by_itself(name: str) -> None:
    model = layers(4)
    alone = copy.deepcopy(model)
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        both = [pipe.optimizer(in_two_groups, lr=0.1), in_two_groups(alone.parameters(), lr=0.1)]
        schedulers = [SCHEDULERS[name](each) for each in both]
        for seed in range(5):
            if seed == 3:
                pipe.repartition(cut_sequential(model, [1]), workers=["worker2", "worker0"])
            for each in both:
                each.zero_grad()
            pipe.step(*batch(seed))
            inputs, target = batch(seed)
            mse(alone(inputs), target).backward()
            for each in both:
                each.step()
            for scheduler in schedulers:
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert_same(pipe, alone)
        found, expected = ([each["lr"] for each in one.param_groups] for one in both)
        assert found == expected
        assert len(both[0].param_groups[0]["params"]) == sum(
            each.dim() > 1 for each in alone.parameters()
        )


def test_groups_that_a_worker_lacks_are_joined_by_their_settings() -> None:
    """The first worker has matrices alone, and makes one group."""

    def split(weights: Any, lr: float) -> torch.optim.Optimizer:
        kinds = [[each for each in weights if each.dim() == dim] for dim in (2, 1)]
        groups = [
            {"params": kind, "momentum": number / 2}
            for number, kind in enumerate(kinds, start=0)
            if kind
        ]
        return torch.optim.SGD(groups, lr=lr)

    model = nn.Sequential(
        nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), *layers(3)[1:]
    ).double()
    alone = copy.deepcopy(model)
    with Pipe(cut_sequential(model, [2]), WORKERS, Schedule1F1B(4), mse) as pipe:
        both = [pipe.optimizer(split, lr=0.1), split(list(alone.parameters()), lr=0.1)]
        assert [len(each["params"]) for each in both[0].param_groups] == [
            len(each["params"]) for each in both[1].param_groups
        ]
        for seed in range(4):
            if seed == 2:
                pipe.repartition(cut_sequential(model, [1]), workers=["worker1", "worker2"])
            for each in both:
                each.param_groups[1]["lr"] *= 0.5
                each.zero_grad()
            pipe.step(*batch(seed))
            inputs, target = batch(seed)
            mse(alone(inputs), target).backward()
            for each in both:
                each.step()
        assert_same(pipe, alone)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_dropped_are_not_stepped_with(set_to_none: bool) -> None:
    """None leaves weights as they are; zeros do not stop momentum and weight decay."""
    model = layers(3)
    alone = copy.deepcopy(model)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        both = [
            pipe.optimizer(torch.optim.SGD, **options),
            torch.optim.SGD(alone.parameters(), **options),  # type: ignore[arg-type]
        ]
        for seed in range(3):
            pipe.step(*batch(seed))
            inputs, target = batch(seed)
            mse(alone(inputs), target).backward()
            if seed == 1:
                for each in both:
                    each.zero_grad(set_to_none)
                assert all(
                    each is None if set_to_none else not each.any()
                    for each in pipe.gradients().values()
                )
                assert pipe.clip_grad_norm_(1.0).item() == 0
            for each in both:
                each.step()
        assert_same(pipe, alone)


def test_a_norm_that_is_not_finite() -> None:
    with Pipe(layers(3), WORKERS, Schedule1F1B(4), mse) as pipe:
        inputs, target = batch(0)
        pipe.step(inputs * math.nan, target)
        with pytest.raises(OptimizerError, match="total norm of the gradients is nan"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert math.isnan(pipe.clip_grad_norm_(1.0))
        with pytest.raises(ConfigurationError, match="norm_type is 0"):
            pipe.clip_grad_norm_(1.0, 0)


def test_hooks_of_an_optimizer_run_on_the_driver() -> None:
    told = []
    with Pipe(layers(3), WORKERS, Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: told.append("before"))
        optimizer.register_step_post_hook(lambda *_: told.append("after"))
        optimizer.register_state_dict_pre_hook(lambda _: told.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: told.append(state["more"]))
        optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
        pipe.step(*batch(0))
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert told == ["before", "after", "saving", 1, "loaded"]


def test_a_state_of_something_else_is_refused_and_nothing_is_changed() -> None:
    model = layers(3)
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        other = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        pipe.step(*batch(0))
        other.step()
        of_sgd = other.state_dict()
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        optimizer.step()
        own = optimizer.state_dict()
        name = "0.weight"
        grown = {**own["state"][name], "exp_avg": torch.zeros(3)}
        half = {**own["parameters"], name: {"shape": (WIDTH, 4), "dtype": "float32"}}
        groups = own["param_groups"]
        wrong: list[tuple[dict[str, Any], str]] = [
            (of_sgd, "it is of the class SGD, and this one Adam"),
            ({**of_sgd, "classes": []}, "group 0 has dampening, .* of another class"),
            (
                {**own, "state": {"x." + key: each for key, each in own["state"].items()}},
                "x.0.bias",
            ),
            ({**own, "state": {**own["state"], name: grown}}, r"'exp_avg' of 0.weight has shape"),
            ({**own, "parameters": half}, r"0.weight is float32\[6, 4\] there and float64"),
            ({**own, "param_groups": groups * 2}, "2 parameter groups there and 1 here"),
            ({**own, "param_groups": [{**groups[0], "params": [name]}]}, r"missing \['0.bias'"),
        ]
        for state, text in wrong:
            with pytest.raises(ConfigurationError, match=text):
                optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        assert after["param_groups"] == own["param_groups"]
        torch.testing.assert_close(after["state"], own["state"], rtol=0, atol=0)


def no_optimizer(weights: Any) -> Any:
    return [weights]


def of_other_tensors(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([each.detach().clone() for each in weights])


def test_what_cannot_be_an_optimizer_of_a_pipeline() -> None:
    with Pipe(layers(3), WORKERS, Schedule1F1B(4), mse) as pipe:
        with pytest.raises(ConfigurationError, match="LBFGS evaluates the model anew"):
            pipe.optimizer(torch.optim.LBFGS)
        with pytest.raises(ArgumentTypeError, match="optimizer_class returned a list"):
            pipe.optimizer(no_optimizer)
        with pytest.raises(ConfigurationError, match="that is no weight of this worker's stages"):
            pipe.optimizer(of_other_tensors)
        first = pipe.optimizer(torch.optim.SGD, lr=0.1)
        second = pipe.optimizer(torch.optim.SGD, lr=0.2)
        for call in (first.step, first.zero_grad, first.state_dict):
            with pytest.raises(ConfigurationError, match="has got another optimizer since"):
                call()
        with pytest.raises(ConfigurationError, match="make groups in the function"):
            second.add_param_group({"params": []})
        weights = [each for group in second.param_groups for each in group["params"]]
        pipe.step(*batch(0))
        for call in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(ConfigurationError, match=r"pipe.clip_grad_norm_\(max_norm\)"):
                call(weights, 1.0)
        with pytest.raises(ConfigurationError, match=r"read it by state_dict\(\)"):
            _ = second.state[weights[0]]


def test_what_the_driver_gets_does_not_change_with_its_own_stages() -> None:
    with Pipe(layers(3), ["driver", "worker0"], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        pipe.step(*batch(0))
        optimizer.step()
        weights, gradients = pipe.state_dict(), pipe.gradients()
        state = optimizer.state_dict()
        kept = copy.deepcopy((weights, gradients, state["state"]))
        pipe.step(*batch(1))
        optimizer.step()
        torch.testing.assert_close((weights, gradients, state["state"]), kept, rtol=0, atol=0)


def test_an_optimizer_of_the_parameters_that_the_driver_has_is_refused() -> None:
    """The workers train copies of them."""
    model = layers(3)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        after = torch.optim.Adam(model.parameters(), lr=0.1)
        pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(*batch(0))
        for each in (before, after):
            with pytest.raises(ConfigurationError, match=r"are trained elsewhere.*pipe\.optimizer"):
                each.step()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(
                ConfigurationError, match=r"trained elsewhere.*pipe\.clip_grad_norm_"
            ):
                clip(model.parameters(), 1.0)
        other = nn.Linear(2, 2)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        inputs, target = batch(0)
        mse(model(inputs), target).backward()  # The program trains its own copy, too.
        before.step()
    model.zero_grad()
    before.step()
    after.step()


class Masked(nn.Module):
    """Mixes the rows of each sample by a mask of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return mask @ self.linear(x), mask


def masked_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    wanted, factors = target
    return ((output[0] - wanted) * factors).square().mean()


@pytest.mark.parametrize("rows", [4, 8])
def test_a_value_that_is_marked_reaches_each_microbatch_whole(rows: int) -> None:
    """Also where it has as many rows as the batch."""
    torch.manual_seed(0)
    stages = [Masked(), Masked()]
    x, wanted = (torch.randn(rows, 4, 4, dtype=torch.float64) for _ in range(2))
    mask = torch.tril(torch.ones(4, 4, dtype=torch.float64))
    factors = torch.arange(4.0, dtype=torch.float64)
    expected = masked_loss(stages[1](*stages[0](x, mask)), (wanted, factors))
    given = {"loss": masked_loss, "example": (x, broadcast(mask))}
    with Pipe(stages, WORKERS, Schedule1F1B(4), **given) as pipe:
        loss = pipe.step((x, broadcast(mask)), (wanted, broadcast(factors)))
        assert loss.item() == pytest.approx(expected.item())
        if rows == 8:
            with pytest.raises(ConfigurationError, match=r"torchweft.pipeline.broadcast\(tensor\)"):
                pipe.step((x, mask), wanted)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    schedule = SchedulePipeDream()
    with Pipe(stages, WORKERS, schedule, masked_loss, optimizer=sgd) as pipe:
        (loss,) = pipe.run([((x, broadcast(mask)), (wanted, factors))])
        assert loss.item() == pytest.approx(expected.item())


def test_a_tensor_that_would_lose_its_gradient_or_is_probably_no_sample_is_told_of() -> None:
    torch.manual_seed(0)
    stages = [Masked(), Masked()]
    mask = torch.tril(torch.ones(4, 4, dtype=torch.float64))
    factors = torch.ones(4, 4, 4, dtype=torch.float64)

    def drawn() -> Tensor:
        return torch.randn(4, 4, 4, dtype=torch.float64)

    with Pipe(stages, WORKERS, Schedule1F1B(4), masked_loss) as pipe:
        for trained in (mask.clone().requires_grad_(), torch.nn.Buffer(mask)):
            with pytest.raises(ConfigurationError, match=r"batch\[1\] (requires|is a buffer)"):
                pipe.step((drawn(), trained), (drawn(), factors.clone()))
        with pytest.raises(ConfigurationError, match=r"the target\[1\] requires grad"):
            pipe.step((drawn(), mask), (drawn(), broadcast(factors.clone().requires_grad_())))
        square = mask[None].expand(4, 4, 4).contiguous()
        x, wanted = drawn(), drawn()
        for _ in range(2):  # All tensors are the same: nothing tells them apart.
            pipe.step((x, square), (wanted, factors))
        for _ in range(2):  # A copy each time, as of samples.
            pipe.step((drawn(), square.clone()), (drawn(), factors.clone()))
        pipe.step((drawn(), square), (drawn(), broadcast(factors)))
        with pytest.warns(RuntimeWarning, match=r"the batch\[1\], float64\[4, 4, 4\].*broadcast"):
            pipe.step((drawn(), square), (drawn(), broadcast(factors)))
        pipe.step((drawn(), square), (drawn(), broadcast(factors)))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with Pipe(stages, WORKERS, SchedulePipeDream(), masked_loss, optimizer=sgd) as pipe:
        losses = pipe.run([((drawn().requires_grad_(), mask), (drawn(), factors))])
        with pytest.raises(ConfigurationError, match=r"the batch\[0\] requires grad"):
            next(losses)


def test_weights_that_train_again_come_back_into_their_groups(tmp_path: Path) -> None:
    model = layers(5)
    alone = copy.deepcopy(model)
    own = in_two_groups(alone.parameters(), lr=0.1)
    schedule = functools.partial(Schedule1F1B, 4)

    def train(pipe: ElasticPipe, optimizer: Any, seed: int) -> None:
        optimizer.zero_grad()
        pipe.step(*batch(seed))
        optimizer.step()

    def names(optimizer: Any) -> list[set[str]]:
        return [{each.name for each in group["params"]} for group in optimizer.param_groups]

    with ElasticPipe(model, WORKERS, schedule, mse) as pipe:
        optimizer = pipe.optimizer(in_two_groups, lr=0.1)
        held = optimizer.param_groups[1]
        optimizer.param_groups[1]["lr"] = own.param_groups[1]["lr"] = 0.03
        train(pipe, optimizer, 0)
        before = names(optimizer)
        pipe.save(tmp_path, step=1)
        pipe.freeze(2)
        assert names(optimizer) == [
            {each for each in group if each[0] not in "01"} for group in before
        ]
        assert optimizer.param_groups[1] is held
        optimizer.param_groups[1]["lr"] = 0.5
        train(pipe, optimizer, 1)
        pipe.resume(tmp_path)
        assert names(optimizer) == before
        assert held["lr"] == 0.03
        train(pipe, optimizer, 2)
        for seed in (0, 2):
            own.zero_grad()
            inputs, target = batch(seed)
            mse(alone(inputs), target).backward()
            own.step()
        assert_same(pipe.pipe, alone)


def test_freezing_the_modules_of_the_driver_warns() -> None:
    model = layers(4)
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        pipe.step(*batch(0))
        model[:2].requires_grad_(False)
        with pytest.warns(
            RuntimeWarning, match=r"of 8 parameters has changed here.*repartition\(model"
        ):
            pipe.step(*batch(0))
        pipe.repartition(model)
        pipe.step(*batch(0))
        assert pipe.gradients()["0.weight"] is None
        assert pipe.gradients()["3.inner.weight"] is not None


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and steps less each time."""

    def __init__(self, params: Any, lr: float, by_worker: bool = False) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 0
        self._by_worker = by_worker

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["k"] += len(group["params"]) if self._by_worker else 1
            group["lr"] /= group["k"]
        super().step()
        for group, lr in zip(self.param_groups, before, strict=True):
            group["lr"] = lr


def test_what_an_optimizer_notes_in_its_groups_is_saved_and_moved(tmp_path: Path) -> None:
    model = layers(4)
    alone = copy.deepcopy(model)
    own = Counting(alone.parameters(), lr=0.1)
    with Pipe(model, WORKERS, Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(Counting, lr=0.1)
        for seed in range(4):
            if seed == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if seed == 2:
                pipe.repartition(model, workers=["worker2", "worker0"])
            if seed == 3:
                pipe.save(tmp_path, step=3)
                pipe.restore(tmp_path)
                optimizer.param_groups[0]["lr"] = own.param_groups[0]["lr"] = 0.05
            own.zero_grad()
            optimizer.zero_grad()
            pipe.step(*batch(seed))
            inputs, target = batch(seed)
            mse(alone(inputs), target).backward()
            own.step()
            optimizer.step()
        assert_same(pipe, alone)
        assert optimizer.state_dict()["param_groups"][0]["k"] == 4
    with Pipe(layers(5), WORKERS, Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(Counting, lr=0.1, by_worker=True)
        pipe.step(*batch(0))
        optimizer.step()
        with pytest.raises(ConfigurationError, match="'worker0' and 'worker1' have changed 'k' of"):
            optimizer.state_dict()
