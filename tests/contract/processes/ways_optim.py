"""Rows of the table: ``torch.optim``, with ``DistributedOptimizer`` where parameters are remote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.contract.processes.ways_table import (
    WORKER,
    Alone,
    Section,
    Side,
    X,
    layer,
    leaf,
    refuse_all,
)
from torchweft import autograd, rpc
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

_optim = Section("torch.optim")
OUTSIDE = ("outside",)
"""The programs open a context for each step themselves."""
STEPS = 3
Options = dict[str, Any]

_kept: dict[str, nn.Parameter] = {}


def keep_weight() -> None:
    """Makes the parameter of ``kept_layer`` in this process anew."""
    _kept["weight"] = nn.Parameter(torch.tensor([0.3, -0.2, 0.9]))


def kept_weight() -> nn.Parameter:
    """Returns that parameter."""
    return _kept["weight"]


def kept_values() -> Tensor:
    """Returns its values."""
    return _kept["weight"].detach().clone()


def kept_layer(x: Tensor) -> Tensor:
    return torch.tanh(x * _kept["weight"])


class Training:
    """Trains a leaf of this process, and a parameter that is elsewhere but on the side ``Alone``.

    Args:
        side: The side.
        optimizer_class: The class of optimizers.
        options: Its options.
    """

    def __init__(self, side: Side, optimizer_class: Any, **options: Any) -> None:
        self._side = side
        self.leaf = leaf()
        side.call(keep_weight)
        self.optimizer: Any
        if isinstance(side, Alone):
            self.optimizer = optimizer_class([self.leaf, kept_weight()], **options)
        else:
            self.optimizer = DistributedOptimizer(optimizer_class, self.references(), **options)

    def references(self) -> list[Any]:
        return [rpc.RRef(self.leaf), rpc.remote(WORKER, kept_weight)]

    def step(self) -> None:
        """Makes one step."""
        loss = lambda: self._side.call(kept_layer, self.leaf * 2).pow(2).sum()  # noqa: E731
        if isinstance(self._side, Alone):
            self.optimizer.zero_grad()
            loss().backward()
            self.optimizer.step()
            return
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss()])
            self.optimizer.step(context_id)

    def run(self, scheduler: Any = None) -> list[Any]:
        """Makes some steps; returns the values after each, and the learning rates."""
        found: list[Any] = []
        for _ in range(STEPS):
            self.step()
            found += [self.leaf.detach().clone(), self._side.call(kept_values)]
            if scheduler is not None:
                metrics = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*[1.0] * metrics)
                found.append(self.options())
        return found

    def options(self) -> list[list[float]]:
        """Returns the numbers among the hyper-parameters of each group."""
        names = ("lr", "momentum", "weight_decay")
        return [
            [float(group[name]) for name in names if name in group]
            for group in self.optimizer.param_groups
        ]


CLASSES: list[tuple[Any, Options]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True, "maximize": True}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1), "maximize": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
]


@_optim.same("all classes without a closure, with `maximize`, `foreach`, `fused`", OUTSIDE)
def _(side: Side) -> Any:
    return [Training(side, kind, **options).run() for kind, options in CLASSES]


@_optim.error("`LBFGS`, and a closure for `step`", "all are refused", OUTSIDE)
def _(side: Side) -> Any:
    training = Training(side, torch.optim.SGD, lr=0.1)
    ways: list[Callable[[], object]] = [
        lambda: Training(side, torch.optim.LBFGS),
        lambda: training.optimizer.step(lambda: 0.0),
    ]
    refuse_all(ways, "closure")


@_optim.same("hooks of steps and of states, also those of all optimizers", OUTSIDE)
def _(side: Side) -> Any:
    seen: list[int] = []
    training = Training(side, torch.optim.SGD, lr=0.1, momentum=0.5)
    optimizer = training.optimizer

    def doubled(state: Any) -> Any:
        state["param_groups"][0]["lr"] *= 2
        return state

    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    optimizer.register_step_post_hook(lambda *_: seen.append(2))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append(3))
    optimizer.register_state_dict_post_hook(lambda _, state: doubled(state))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: doubled(state))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append(4))
    handle = register_optimizer_step_pre_hook(
        lambda given, *_: seen.append(5 * (given is optimizer))
    )
    try:
        before = training.run()
    finally:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    # Other optimizers of a process with both sides have no part in it.
    return before, [each for each in seen if each], training.options(), training.run()


@_optim.same("`add_param_group`", OUTSIDE)
def _(side: Side) -> Any:
    training = Training(side, torch.optim.SGD, lr=0.1)
    other = leaf()
    alone = isinstance(side, Alone)
    training.optimizer.add_param_group({"params": [other if alone else rpc.RRef(other)], "lr": 1.0})
    return training.run(), training.options(), other.detach()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda _: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [1, 2]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda it: lr_scheduler.ExponentialLR(it, 0.5),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 3),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 2),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.5, total_steps=5),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(it), lr_scheduler.ExponentialLR(it, 0.5)]
    ),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it), lr_scheduler.ExponentialLR(it, 0.5)], [1]
    ),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0),
    "SWALR": lambda it: swa_utils.SWALR(it, 0.3, anneal_epochs=2),
}


@_optim.same("all schedulers of `lr_scheduler`, and `swa_utils.SWALR`", OUTSIDE)
def _(side: Side) -> Any:
    found = []
    for make in SCHEDULERS.values():
        training = Training(side, torch.optim.SGD, lr=0.1, momentum=0.9)
        found.append(training.run(make(training.optimizer)))
    return found


@_optim.same("`state_dict` of one process, loaded here and there", OUTSIDE)
def _(side: Side) -> Any:
    model = Training(Alone(), torch.optim.Adam, lr=0.2)
    model.run()
    training = Training(side, torch.optim.Adam, lr=0.1)
    training.optimizer.load_state_dict(model.optimizer.state_dict())
    return training.run()


@_optim.error("other parameters in `param_groups`", "all are refused", OUTSIDE)
def _(side: Side) -> Any:
    def removing() -> None:
        training = Training(side, torch.optim.SGD, lr=0.1)
        training.optimizer.param_groups[0]["params"].pop()
        training.step()

    def adding() -> None:
        training = Training(side, torch.optim.SGD, lr=0.1)
        training.optimizer.param_groups.append({"params": [rpc.RRef(leaf())], "lr": 0.1})
        training.step()

    refuse_all([removing, adding], "other parameters or groups")


@_optim.error("`torch.amp.GradScaler`", "all are refused", OUTSIDE)
def _(side: Side) -> Any:
    scaler = torch.amp.GradScaler("cpu")
    training = Training(side, torch.optim.SGD, lr=0.1)
    scaler.scale(torch.zeros(()))
    refuse_all([lambda: scaler.step(training.optimizer)], "bfloat16")


@_optim.error(
    "a step of an optimizer of this process, where the gradients are in a context",
    "finds no gradient",
    ("context",),
)
def _(side: Side) -> Any:
    x = leaf()
    optimizer: Optimizer = torch.optim.SGD([x], lr=0.1)
    side.backward(side.call(layer, x * 2).sum())
    optimizer.step()


@_optim.error("`swa_utils.AveragedModel`, `update_bn`, of a model with a `RemoteModule`", "all are")
def _(side: Side) -> Any:
    model = nn.Sequential(RemoteModule(WORKER, nn.Linear, args=(3, 3)), nn.Linear(3, 3))
    ways: list[Callable[[], object]] = [
        lambda: swa_utils.AveragedModel(model).update_parameters(model),
        lambda: swa_utils.update_bn([X[None]], model),
    ]
    refuse_all(ways, "not supported for RemoteModule")


@_optim.same("`swa_utils.AveragedModel` of modules here, beside calls", OUTSIDE)
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        side.backward(side.call(layer, model(X)).sum())
        optimizer.step()
        average.update_parameters(model)
    return [each.detach() for each in average.parameters()]


# torch.nn.utils, in contexts

_clipping = Section("Clipping in a context")


@_clipping.error(
    "`clip_grad_norm_`, `clip_grad_value_`, `clip_grads_with_norm_`", "all are", ("context",)
)
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(layer, x * 2).sum())
    ways: list[Callable[[], object]] = [
        lambda: utils.clip_grad_norm_([x], 1.0),
        lambda: utils.clip_grad_norm_(iter([x]), 1.0),
        lambda: utils.clip_grad_value_(x, 1.0),
        lambda: utils.clip_grads_with_norm_([x], 1.0, torch.ones(())),
    ]
    refuse_all(ways, "finds no gradient")


@_clipping.same("`get_total_norm` of the gradients of a context", ("context",))
def _(side: Side) -> Any:
    x = leaf()
    side.backward(side.call(layer, x * 2).sum())
    gradient = side.gradient(x)
    assert gradient is not None
    return utils.get_total_norm([gradient])
