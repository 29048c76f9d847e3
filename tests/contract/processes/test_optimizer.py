"""``DistributedOptimizer`` on real workers, compared with a local optimizer in one process."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import torchweft
from torchweft import rpc
from torchweft.autograd import backward, context
from torchweft.errors import AutogradError, ConfigurationError, OptimizerError, SerializationError
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer, clip_grad_norm_

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
FIRST, SECOND = "worker0", "worker1"
ROWS = 12


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


class Part(nn.Module):
    """A layer of the model, with an embedding in front of it if it has ``rows``."""

    def __init__(self, seed: int, width_in: int, width_out: int, rows: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.table = parameter(rows, width_in) if rows else None
        self.weight = parameter(width_out, width_in)
        self.never_used = parameter(2)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is not None:
            inputs = nn.functional.embedding(inputs, self.table, sparse=True)
        return torch.tanh(inputs @ self.weight.T)


class Dense(Part):
    """A ``Part`` whose embedding has dense gradients."""

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.table is not None
        inputs = nn.functional.embedding(inputs, self.table)
        return torch.tanh(inputs @ self.weight.T)


class Twin:
    """A model over three workers, and the same model in one process."""

    def __init__(self, first_kind: type[Part] = Dense) -> None:
        recipes: list[Any] = [(1, 4, 5, ROWS), (2, 5, 3), (3, 3, 1)]
        self.remote = [RemoteModule(FIRST, first_kind, recipes[0])]
        self.remote.append(RemoteModule(SECOND, Part, recipes[1]))
        self.local = [first_kind(*recipes[0]), Part(*recipes[1])]
        self.own = Part(*recipes[2])
        self.local.append(Part(*recipes[2]))
        self.references: list[Any] = [r for m in self.remote for r in m.remote_parameters()]
        self.references += [rpc.RRef(p) for p in self.own.parameters()]
        self.parameters = [p for module in self.local for p in module.parameters()]

    def remote_loss(self, seed: int) -> Tensor:
        hidden = self.remote[1](self.remote[0](batch(seed)))
        loss: Tensor = self.own(hidden).square().sum()
        return loss

    def local_loss(self, seed: int) -> Tensor:
        value: Tensor = batch(seed)
        for module in self.local:
            value = module(value)
        return value.square().sum()

    def check_equal(self) -> None:
        for reference, parameter in zip(self.references, self.parameters, strict=True):
            assert torch.equal(reference.to_here(), parameter)


def batch(seed: int) -> Tensor:
    return torch.randint(ROWS, (6,), generator=torch.Generator().manual_seed(seed))


def train_both(
    twin: Twin,
    remote_optimizer: DistributedOptimizer,
    local_optimizer: torch.optim.Optimizer,
    steps: int = 3,
    after: Callable[[], None] = lambda: None,
) -> None:
    for seed in range(steps):
        with context() as context_id:
            loss = twin.remote_loss(seed)
            backward(context_id, [loss])
            remote_optimizer.step(context_id)
        local_optimizer.zero_grad()
        local_loss = twin.local_loss(seed)
        assert torch.equal(loss, local_loss)
        local_loss.backward()  # type: ignore[no-untyped-call]
        local_optimizer.step()
        after()


def grads(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def set_grads(module: rpc.RRef[nn.Module], number: float) -> None:
    for parameter in module.local_value().parameters():
        parameter.grad = torch.full_like(parameter, number)


def get_grads(module: rpc.RRef[nn.Module]) -> list[Tensor | None]:
    return grads(module.local_value())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_training_is_bit_equal_to_one_process(kind: Any, options: dict[str, Any]) -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(kind, twin.references, **options)
    train_both(twin, optimizer, kind(twin.parameters, **options))
    twin.check_equal()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # from Adagrad itself
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_sparse_gradients_reach_the_local_optimizer_as_they_are(kind: Any) -> None:
    twin = Twin(Part)
    tables = [twin.references[0]], [twin.parameters[0]]
    optimizer = DistributedOptimizer(kind, tables[0], lr=0.05)
    train_both(twin, optimizer, kind(tables[1], lr=0.05))
    twin.check_equal()


def test_an_optimizer_that_takes_no_sparse_gradient_says_so_with_its_worker() -> None:
    twin = Twin(Part)
    optimizer = DistributedOptimizer(torch.optim.Adam, twin.references)
    with context() as context_id:
        backward(context_id, [twin.remote_loss(0)])
        with pytest.raises(OptimizerError, match=r"'worker0'.*sparse") as caught:
            optimizer.step(context_id)
    assert (caught.value.worker, caught.value.others) == (FIRST, ())
    assert isinstance(caught.value.__cause__, RuntimeError)


class Grumpy(torch.optim.SGD):
    """Fails in every step."""

    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError(f"not on {rpc.get_worker_info().name}")


def test_all_workers_that_failed_are_named() -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(Grumpy, twin.references)
    with (
        context() as context_id,
        pytest.raises(OptimizerError, match=r"'driver'.*'worker0'.*not on worker1") as caught,
    ):
        optimizer.step(context_id)
    assert (caught.value.worker, caught.value.others) == ("driver", (FIRST, SECOND))
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_parameter_groups() -> None:
    twin = Twin()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[1::2], "lr": 0.5, "nesterov": True},
            {"params": parameters[::2]},
        ]

    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = DistributedOptimizer(torch.optim.SGD, groups(twin.references), **options)
    local_optimizer = torch.optim.SGD(groups(twin.parameters), **options)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["nesterov"] is True
    assert optimizer.defaults == local_optimizer.defaults
    train_both(twin, optimizer, local_optimizer)
    twin.check_equal()


def test_a_group_can_be_added_on_workers_old_and_new() -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(torch.optim.Adam, twin.references[:2], lr=0.1)
    local_optimizer = torch.optim.Adam(twin.parameters[:2], lr=0.1)
    train_both(twin, optimizer, local_optimizer)
    with pytest.raises(ConfigurationError, match="parameters 1 and 2 are the same"):
        optimizer.add_param_group({"params": twin.references[1:]})
    optimizer.add_param_group({"params": twin.references[2:], "lr": 0.01})
    local_optimizer.add_param_group({"params": twin.parameters[2:], "lr": 0.01})
    train_both(twin, optimizer, local_optimizer)
    twin.check_equal()
    mine, theirs = optimizer.state_dict(), local_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]


def test_grad_stays_as_the_user_left_it() -> None:
    twin = Twin()
    module = twin.remote[0].get_module_rref()
    rpc.rpc_sync(FIRST, set_grads, args=(module, 7.0))
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=0.1)
    train_both(twin, optimizer, torch.optim.SGD(twin.parameters, lr=0.1))
    twin.check_equal()
    assert grads(twin.own) == [None, None]
    left = rpc.rpc_sync(FIRST, get_grads, args=(module,))
    assert all(grad is not None and bool((grad == 7).all()) for grad in left)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.7**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_work_unchanged(name: str) -> None:
    twin = Twin()
    options = {"lr": 0.2, "momentum": 0.9}
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, **options)
    local_optimizer = torch.optim.SGD(twin.parameters, **options)  # type: ignore[arg-type]
    schedulers = [SCHEDULERS[name](each) for each in (optimizer, local_optimizer)]
    rates = []

    def after() -> None:
        for scheduler in schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == local_optimizer.param_groups[0]["lr"]
        rates.append(optimizer.param_groups[0]["lr"])

    train_both(twin, optimizer, local_optimizer, steps=5, after=after)
    twin.check_equal()
    assert len(set(rates)) > 1


def test_a_scheduler_that_looks_at_the_loss_works_unchanged() -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=0.2)
    local_optimizer = torch.optim.SGD(twin.parameters, lr=0.2)
    schedulers = [
        lr_scheduler.ReduceLROnPlateau(each, patience=0) for each in (optimizer, local_optimizer)
    ]

    def after() -> None:
        for scheduler in schedulers:
            scheduler.step(1.0)

    train_both(twin, optimizer, local_optimizer, steps=4, after=after)
    twin.check_equal()
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_learning_rate_that_is_a_tensor_is_told_when_changed_in_place() -> None:
    twin = Twin()
    rates = [torch.tensor(0.1, dtype=torch.float64) for _ in range(2)]
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=rates[0])
    local_optimizer = torch.optim.SGD(twin.parameters, lr=rates[1])
    optimizer.param_groups[0]["lr"] = rates[0]

    def after() -> None:
        for rate in rates:
            rate.mul_(0.5)

    train_both(twin, optimizer, local_optimizer, after=after)
    twin.check_equal()


def saved_and_loaded(state: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def test_training_goes_on_from_a_state_dict_saved_by_either_kind() -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(torch.optim.Adam, twin.references, lr=0.05)
    local_optimizer = torch.optim.Adam(twin.parameters, lr=0.05)
    train_both(twin, optimizer, local_optimizer)
    optimizer.param_groups[0]["lr"] = local_optimizer.param_groups[0]["lr"] = 0.02
    mine, theirs = saved_and_loaded(optimizer.state_dict()), local_optimizer.state_dict()
    owners = [each["owner"] for each in mine["parameters"]]
    assert owners == [FIRST] * 3 + [SECOND] * 2 + ["driver"] * 2
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    resumed = DistributedOptimizer(torch.optim.Adam, twin.references, lr=9.0)
    resumed.load_state_dict(theirs)
    assert resumed.param_groups[0]["lr"] == 0.02
    resumed_locally = torch.optim.Adam(twin.parameters, lr=9.0)
    resumed_locally.load_state_dict(mine)
    train_both(twin, resumed, resumed_locally)
    twin.check_equal()


def test_a_state_dict_is_a_copy() -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=0.1, momentum=0.9)
    local_optimizer = torch.optim.SGD(twin.parameters, lr=0.1, momentum=0.9)
    train_both(twin, optimizer, local_optimizer)
    state = optimizer.state_dict()
    before = saved_and_loaded(state)
    train_both(twin, optimizer, local_optimizer)
    for number, saved in before["state"].items():
        torch.testing.assert_close(state["state"][number], saved, rtol=0, atol=0)


def test_a_state_dict_of_other_parameters_is_refused() -> None:
    twin = Twin()
    state = DistributedOptimizer(torch.optim.SGD, twin.references[:5]).state_dict()
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references)
    with pytest.raises(ConfigurationError, match=r"5 parameters in group 0, the optimizer 7"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_equals_torch(norm_type: float, max_norm: float) -> None:
    twin = Twin()
    optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=0.1)
    with context() as context_id:
        backward(context_id, [twin.remote_loss(1)])
        total = clip_grad_norm_(context_id, twin.references, max_norm, norm_type)
        optimizer.step(context_id)
    twin.local_loss(1).backward()  # type: ignore[no-untyped-call]
    expected = nn.utils.clip_grad_norm_(twin.parameters, max_norm, norm_type)
    torch.optim.SGD(twin.parameters, lr=0.1).step()
    assert torch.equal(total, expected)
    twin.check_equal()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_counts_sparse_gradients_as_dense_ones(norm_type: float) -> None:
    totals = []
    for kind in (Part, Dense):
        twin = Twin(kind)
        optimizer = DistributedOptimizer(torch.optim.SGD, twin.references, lr=0.1)
        with context() as context_id:
            backward(context_id, [twin.remote_loss(1)])
            totals.append(clip_grad_norm_(context_id, twin.references, 0.01, norm_type))
            assert clip_grad_norm_(context_id, twin.references, 1.0, norm_type) == pytest.approx(
                0.01, rel=1e-3
            )
            optimizer.step(context_id)
        totals.append(twin.references[0].to_here())
    torch.testing.assert_close(totals[:2], totals[2:], atol=1e-12, rtol=0)


def test_gradients_that_are_not_finite_can_be_refused() -> None:
    own = nn.Parameter(torch.tensor([1.0]))
    with context() as context_id:
        backward(context_id, [(own * math.inf).sum()])
        with pytest.raises(OptimizerError, match="inf"):
            clip_grad_norm_(context_id, [rpc.RRef(own)], 1.0, error_if_nonfinite=True)


def test_clipping_without_gradients_returns_zero() -> None:
    with context() as context_id:
        references = [rpc.RRef(nn.Parameter(torch.ones(2)))]
        assert clip_grad_norm_(context_id, references, 1.0).item() == 0


class Shared(nn.Module):
    """One table; each trainer looks up rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, row: int) -> Tensor:
        return self.table[row].sum()  # the backward pass needs no saved weight


def train_row(module: RemoteModule, row: int, steps: int) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    for _ in range(steps):
        with context() as context_id:
            backward(context_id, [module(row)])
            optimizer.step(context_id)


def test_trainers_side_by_side_do_not_mix_their_gradients() -> None:
    module, steps = RemoteModule(FIRST, Shared), 8
    running = rpc.rpc_async(SECOND, train_row, args=(module, 0, steps))
    thread = threading.Thread(target=train_row, args=(module, 1, steps // 2))
    thread.start()
    thread.join()
    running.wait()
    table = module.state_dict()["table"]
    expected = torch.ones(2, 3, dtype=torch.float64)
    for row, done in enumerate([steps, steps // 2]):
        for _ in range(done):
            expected[row] -= 0.1
    assert torch.equal(table, expected)


def make_list() -> list[int]:
    return [1]


def test_what_cannot_work_is_refused_with_a_fix() -> None:
    twin = Twin()
    sgd = torch.optim.SGD
    wrong: list[tuple[Any, Any, str]] = [
        (sgd, [], "params_rref is empty"),
        (sgd(twin.parameters), twin.references, "pass a class like torch.optim.SGD"),
        (torch.optim.LBFGS, twin.references, "LBFGS evaluates the model anew"),
        (sgd, [rpc.remote(FIRST, make_list)], "parameter 0, on worker 'worker0', is a list"),
        (sgd, [rpc.RRef(torch.ones(2, requires_grad=True) + 1)], "is a tensor that is no leaf"),
        (sgd, [twin.references[0]] * 2, "parameters 0 and 1 are the same"),
        (
            sgd,
            [twin.references[1], *twin.remote[0].remote_parameters()],
            "parameters 0 and 2, on worker 'worker0', are the same tensor behind two RRefs",
        ),
    ]
    for kind, parameters, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            DistributedOptimizer(kind, parameters)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(sgd, twin.references, lr=-1.0)


def test_a_step_that_cannot_work_is_refused_with_a_fix() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, Twin().references)
    with pytest.raises(ConfigurationError, match="takes no closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(AutogradError, match="not alive"):
        optimizer.step(123)
    with pytest.raises(SerializationError, match="state_dict"):
        rpc.rpc_sync(FIRST, id, args=(optimizer,))
    assert "7 parameters on" in repr(optimizer)
