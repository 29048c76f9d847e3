"""``torch.compile`` around remote calls, and in remote functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule, local_parameters
from torchweft.optim import DistributedOptimizer

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


class Net(nn.Module):
    """Has its middle layer on another worker, or here."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(3, 3), middle, nn.Linear(3, 1)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.middle(self.first(value).tanh()).sin()
        result: Tensor = self.last(hidden)
        return result


def make_middle() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def gradient_through_a_compiled_function(to: str) -> tuple[Tensor, int]:
    """Returns the gradient of twos, and how often the compiler was at work for three calls."""
    import torch._dynamo.utils as compiler

    def run(value: Tensor) -> Tensor:
        return rpc.rpc_sync(to, lambda value: value.square(), (3 * value,)).sin().sum()

    compiled = torch.compile(run, backend="eager")
    value = torch.full((3,), 2.0, requires_grad=True)
    for _ in range(3):
        with context() as context_id:
            backward(context_id, [compiled(value)])
            gradient = get_gradients(context_id)[value]
    breaks: int = compiler.counters["graph_break"].total()
    return gradient, breaks


def gradients_of_compiled_net(to: str) -> list[Tensor]:
    """Runs where the compiler has been imported; the graph of the net is cut by the call."""
    net = Net(RemoteModule(to, make_middle))
    compiled = torch.compile(net, backend="eager")
    for _ in range(2):
        with context() as context_id:
            backward(context_id, [compiled(torch.ones(2, 3)).sum()])
            gradients = get_gradients(context_id)
    return [gradients[parameter] for parameter in local_parameters(net)]


def loss_of_compiled_steps(to: str) -> Tensor:
    """Compiles whole steps, with calls of each kind."""
    middle = RemoteModule(to, make_middle)
    optimizer = DistributedOptimizer(torch.optim.SGD, middle.remote_parameters(), lr=0.1)

    def step(value: Tensor) -> Tensor:
        with context() as context_id:
            future = rpc.rpc_async(to, torch.mul, (value, 3))
            reference = rpc.remote(to, torch.mul, (value, 3))
            loss = middle(future.wait() + reference.to_here() + value).square().sum()
            backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    losses = [compiled(torch.ones(2, 3)) for _ in range(3)]
    return losses[-1]


def test_a_compiled_function_may_make_a_call(group: Cluster) -> None:
    gradient, breaks = rpc.rpc_sync("worker0", gradient_through_a_compiled_function, ("worker1",))
    expected = torch.full((3,), 2.0, requires_grad=True)
    (3 * expected).square().sin().sum().backward()
    assert expected.grad is not None
    assert torch.allclose(gradient, expected.grad)
    assert breaks == 1


def test_a_compiled_module_may_call_a_remote_module(group: Cluster) -> None:
    arrived = rpc.rpc_sync("worker0", gradients_of_compiled_net, args=("worker1",))
    net = Net(make_middle())
    net(torch.ones(2, 3)).sum().backward()
    of_here = [*net.first.parameters(), *net.last.parameters()]
    for gradient, parameter in zip(arrived, of_here, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad)


def test_a_compiled_step_may_make_calls_and_step_an_optimizer(group: Cluster) -> None:
    arrived = rpc.rpc_sync("worker0", loss_of_compiled_steps, args=("worker1",))
    middle = make_middle()
    optimizer = torch.optim.SGD(middle.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = middle(7 * torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
    assert torch.allclose(arrived, loss)
