"""States of optimizers: restored exactly, with their types, or refused with nothing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.hybrid_functions import RULES, draw, loss_of, make_net
from tests.contract.processes.optimizer_sequences import Halved
from torchweft import checkpoint
from torchweft.autograd import backward, context
from torchweft.embedding import Copies, TableWise
from torchweft.errors import ConfigurationError, StateMismatch
from torchweft.hybrid import HybridModel
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

# The tests share workers, which connect to one another on first use.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # from Adagrad itself
]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


def linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 2, dtype=dtype)


class Remote:
    """A layer on a worker, and its optimizer."""

    def __init__(self, kind: Any, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.dtype = dtype
        self.module = RemoteModule("worker0", linear, args=(dtype,))
        self.optimizer = DistributedOptimizer(kind, self.module.remote_parameters(), **options)

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer}

    def train(self, steps: int = 2) -> list[Tensor]:
        for _ in range(steps):
            with context() as context_id:
                loss = self.module(torch.ones(3, 4, dtype=self.dtype)).square().sum()
                backward(context_id, [loss])
                self.optimizer.step(context_id)
        return [each.to_here().detach() for each in self.module.remote_parameters()]


def types_of(state: dict[str, Any]) -> set[torch.dtype]:
    return {each["held"].dtype for each in state["state"].values()}


@pytest.mark.parametrize("by", ["snapshot", "state_dict"])
def test_a_state_in_a_type_of_its_own_is_restored_bit_by_bit(by: str, tmp_path: Path) -> None:
    """``Halved`` keeps a momentum in float32 for parameters in float64, and a string."""
    first = Remote(Halved, lr=0.1)
    first.train()
    checkpoint.save(tmp_path, first.tree, step=2)
    state = first.optimizer.state_dict()
    assert types_of(state) == {torch.float32}
    expected = first.train()
    again = Remote(Halved, lr=0.1)
    if by == "snapshot":
        checkpoint.restore(tmp_path, again.tree)
    else:
        again.module.load_state_dict(
            dict(zip(["weight", "bias"], map(torch.clone, trained_twice()), strict=True))
        )
        again.optimizer.load_state_dict(state)
    assert types_of(again.optimizer.state_dict()) == {torch.float32}
    assert again.optimizer.state_dict()["state"][0]["note"] == "halved"
    for found, wanted in zip(again.train(), expected, strict=True):
        assert torch.equal(found, wanted)


def trained_twice() -> list[Tensor]:
    """Returns the weights after two steps."""
    return Remote(Halved, lr=0.1).train()


def test_an_optimizer_in_the_state_of_a_program_keeps_its_types(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = linear()
        return module, Halved(module.parameters(), lr=0.1)

    module, optimizer = make()
    module(torch.ones(4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"optimizer": optimizer}, step=1)
    module, again = make()
    checkpoint.restore(tmp_path, {"optimizer": again})
    (found, *_), (expected, *_) = (
        each.state_dict()["state"].values() for each in (again, optimizer)
    )
    assert torch.equal(found["held"], expected["held"])
    assert (found["held"].dtype, found["note"]) == (torch.float32, "halved")


def test_a_snapshot_of_other_types_is_refused(tmp_path: Path) -> None:
    first = Remote(torch.optim.SGD, lr=0.1)
    checkpoint.save(tmp_path, {**first.tree, "sum": torch.ones(2)}, step=1)
    other = Remote(torch.optim.SGD, torch.float32, lr=0.1)
    before = [each.to_here() for each in other.module.remote_parameters()]
    text = r"model:weight has type torch.float64 in the snapshot and torch.float32 here"
    with pytest.raises(StateMismatch, match=text) as caught:
        checkpoint.restore(tmp_path, {**other.tree, "sum": torch.ones(2, dtype=torch.int64)})
    assert "sum has type torch.float32 in the snapshot and torch.int64" in str(caught.value)
    for parameter, value in zip(other.module.remote_parameters(), before, strict=True):
        assert torch.equal(parameter.to_here(), value)


def test_a_state_of_another_optimizer_is_refused() -> None:
    adam = Remote(torch.optim.Adam, lr=0.1)
    adam.train()
    of_adam = adam.optimizer.state_dict()
    own = torch.optim.Adam(linear().parameters(), lr=0.1).state_dict()
    sgd = Remote(torch.optim.SGD, lr=0.5, momentum=0.9).optimizer
    small = {**of_adam["state"][0], "exp_avg": torch.zeros(3)}
    single = [{**each, "dtype": "float32"} for each in of_adam["parameters"]]
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (sgd, of_adam, "has the class Adam, the optimizer SGD"),
        (sgd, own, "group 0 has amsgrad, .* of another class"),
        (adam.optimizer, {**of_adam, "state": {0: small}}, "'exp_avg' of parameter 0 has shape"),
        (adam.optimizer, {**of_adam, "state": {0: [1]}}, "where a dict is needed"),
        (adam.optimizer, {**of_adam, "parameters": single}, "type float32 for parameter 0"),
    ]
    for optimizer, state, text in wrong:
        with pytest.raises(ConfigurationError, match=text):
            optimizer.load_state_dict(state)
    assert sgd.param_groups[0]["lr"] == 0.5
    adam.optimizer.load_state_dict(own)  # Of torch itself, and of the same class.
    assert not adam.optimizer.state_dict()["state"]


def test_names_of_parameters_are_compared(tmp_path: Path) -> None:
    module = linear()

    def named(*names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(zip(names, module.parameters(), strict=True), lr=0.1)

    checkpoint.save(tmp_path, {"optimizer": named("weight", "bias")}, step=1)
    checkpoint.restore(tmp_path, {"optimizer": named("weight", "bias")})
    with pytest.raises(StateMismatch, match=r"of the names \['weight', 'bias'\] there and"):
        checkpoint.restore(tmp_path, {"optimizer": named("scale", "shift")})


def test_hooks_of_states_run() -> None:
    told: list[Any] = []
    optimizers: list[Any] = [Remote(torch.optim.SGD, lr=0.1).optimizer]
    with hybrid("hooked") as model:
        optimizers += [model.optimizer(RULES["adagrad"], sgd)]
        optimizers += [optimizers[-1].rows]
        for optimizer in optimizers:
            optimizer.register_state_dict_pre_hook(lambda _: told.append("saving"))
            optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
            optimizer.register_load_state_dict_pre_hook(lambda _, state: told.append(state["more"]))
            optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
            told.clear()
            optimizer.load_state_dict(optimizer.state_dict())
            assert told[0] == "saving"
            assert told[-2:] == [1, "loaded"]


# Hybrid models


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


@contextlib.contextmanager
def hybrid(name: str, net: Any = None) -> Iterator[HybridModel]:
    """A model with rows on a server, a table that stays, and a dense part."""
    places = {"words": TableWise("worker0"), "tower.users": TableWise("worker1"), "days": Copies()}
    model = HybridModel(
        make_net(0) if net is None else net, ["worker0", "worker1"], name=name, places=places
    )
    with contextlib.closing(model):
        yield model


def step(model: HybridModel, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, draw(0, 1)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


DENSE: list[tuple[str, Callable[..., torch.optim.Optimizer], str]] = [
    ("adagrad", torch.optim.Adam, "it is of the class SGD there and Adam here"),
    ("adagrad", lambda given: sgd([{"params": given}, {"params": []}]), "groups of .* parameters"),
    ("adam", sgd, r"the state is that of Adagrad\(.*and the tables have SparseAdam"),
]


@pytest.mark.parametrize(("rule", "dense", "text"), DENSE)
def test_a_state_of_another_hybrid_optimizer_is_refused(
    rule: str, dense: Any, text: str, tmp_path: Path
) -> None:
    with hybrid("first") as model:
        optimizer = model.optimizer(RULES["adagrad"], sgd)
        step(model, optimizer)
        state = optimizer.state_dict()
        model.save(tmp_path, step=1)
    with hybrid(f"other {rule}") as model:
        optimizer = model.optimizer(RULES[rule], dense)
        before = model.full_state_dict()
        rates = [group["lr"] for group in optimizer.param_groups]
        with pytest.raises(ConfigurationError, match=text):
            optimizer.load_state_dict(state)
        with pytest.raises(StateMismatch):
            model.restore(tmp_path)
        assert rates == [group["lr"] for group in optimizer.param_groups]
        torch.testing.assert_close(model.full_state_dict(), before, rtol=0, atol=0)


def test_what_a_hybrid_optimizer_refuses() -> None:
    net = make_net(0)
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    with hybrid("refusing", net) as model:
        with pytest.raises(ConfigurationError, match="dense returned a LBFGS"):
            model.optimizer(RULES["sgd"], torch.optim.LBFGS)
        with pytest.raises(ConfigurationError, match=r"rows are on servers: make the optimizer by"):
            before.step()
        optimizer = model.optimizer(RULES["sgd"], sgd)
        for each in (optimizer, optimizer.rows):
            with pytest.raises(ConfigurationError, match="takes no closure"):
                each.step(lambda: 0.0)  # type: ignore[union-attr, arg-type]
        with pytest.raises(ConfigurationError, match="in the parts of this optimizer"):
            _ = optimizer.state[before.param_groups[0]["params"][0]]
        step(model, optimizer)
        loss_of(model, draw(0, 2)).backward()  # type: ignore[no-untyped-call]
        with pytest.warns(RuntimeWarning, match=r"step\(\) without zero_grad\(\) since the step"):
            optimizer.step()
