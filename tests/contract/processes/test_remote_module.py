"""``RemoteModule`` and ``Chain`` on real workers."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchweft
from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import (
    ArgumentTypeError,
    ConfigurationError,
    SerializationError,
    UnknownWorker,
)
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule, local_parameters
from torchweft.optim import DistributedOptimizer

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
FIRST, SECOND = "worker0", "worker1"


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


class Scale(nn.Module):
    """Multiplies; reports its training mode and its worker."""

    def __init__(self, factor: float, *, shift: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.inner = nn.Linear(1, 1, bias=False)
        self.shift = shift

    def forward(self, value: Tensor, *, times: int = 1) -> Tensor:
        return value * self.factor * times + self.shift

    def describe(self) -> tuple[bool, str]:
        return self.training, rpc.get_worker_info().name


def make_scale(factor: float) -> nn.Module:
    return Scale(factor)


def make_number() -> int:
    return 3


def call_module(module: RemoteModule, value: Tensor) -> Tensor:
    result: Tensor = module(value)
    return result


def add(value: Tensor, other: Tensor, *, weight: float = 1.0) -> Tensor:
    return value + weight * other


@pytest.mark.parametrize("place", [FIRST, f"{FIRST}/cpu", "rank:1", "rank:1/cpu"])
def test_a_module_is_made_where_it_is_asked_for(place: str) -> None:
    module = RemoteModule(place, Scale, args=(2.0,), kwargs={"shift": 1.0})
    assert module.get_module_rref().rpc_sync().describe() == (True, FIRST)
    assert module.on == FIRST
    assert module(torch.tensor([1.0, 2.0]), times=2).tolist() == [5.0, 9.0]
    assert module.forward(torch.ones(1)).tolist() == [3.0]
    assert module.forward_async(torch.ones(1)).wait().tolist() == [3.0]
    assert module.forward_remote(torch.ones(1)).to_here().tolist() == [3.0]


def test_a_function_may_make_the_module() -> None:
    assert RemoteModule(FIRST, make_scale, args=(3.0,))(torch.ones(1)).tolist() == [3.0]


def test_what_is_no_module_is_refused() -> None:
    for wrong in (dict, nn.Linear(1, 1), "Linear", make_number):
        with pytest.raises(TypeError) as caught:
            RemoteModule(FIRST, wrong)  # type: ignore[arg-type]
        assert isinstance(caught.value, ArgumentTypeError)
    with pytest.raises(UnknownWorker, match="nobody"):
        RemoteModule("nobody", Scale)
    with pytest.raises(TypeError, match="factor"):
        RemoteModule(FIRST, Scale)


def test_gradients_flow_through_and_an_optimizer_steps() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    parameters = module.remote_parameters()
    assert len(parameters) == 2
    assert len(module.remote_parameters(recurse=False)) == 1
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    value = torch.tensor([3.0], requires_grad=True)
    with context() as context_id:
        backward(context_id, [module(value).sum()])
        assert get_gradients(context_id)[value].tolist() == [2.0]
        optimizer.step(context_id)
    assert module.state_dict()["factor"].item() == pytest.approx(2.0 - 0.1 * 3.0)


def test_train_and_eval_reach_the_module() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    for mode, switched in ((False, module.eval()), (True, module.train())):
        assert switched is module
        module.train(mode)
        assert module.training is mode
        assert module.get_module_rref().rpc_sync().describe()[0] is mode


def test_a_deep_copy_is_a_module_of_its_own_on_the_same_worker() -> None:
    """As for a target network: the copy must not follow what the original learns."""
    model = nn.Sequential(RemoteModule(FIRST, Scale, args=(2.0,)), nn.Flatten(0)).eval()
    target = copy.deepcopy(model)
    value = torch.ones(1)
    assert isinstance(target[0], RemoteModule)
    assert target[0].training is False
    assert target[0].get_module_rref().rpc_sync().describe() == (False, FIRST)
    optimizer = DistributedOptimizer(torch.optim.SGD, model[0].remote_parameters(), lr=1.0)
    with context() as context_id:
        backward(context_id, [model(value).sum()])
        optimizer.step(context_id)
    assert (model(value).item(), target(value).item()) == (1, 2)
    target.load_state_dict(model.state_dict())
    assert target(value).item() == 1


def test_state_goes_both_ways() -> None:
    module, other = (RemoteModule(FIRST, Scale, args=(factor,)) for factor in (2.0, 3.0))
    state = module.state_dict()
    assert list(state) == ["factor", "inner.weight"]
    parameters = other.remote_parameters()
    other.load_state_dict(state)
    assert parameters[0].to_here().item() == 2.0
    with pytest.raises(RuntimeError, match=r'Missing key.*"inner\.weight"'):
        other.load_state_dict({"factor": torch.tensor(1.0)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"more"'):
        other.load_state_dict({**state, "more": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.weight"):
        other.load_state_dict({**state, "inner.weight": torch.ones(5, 5)})
    outcome = other.load_state_dict({"more": torch.ones(1)}, strict=False)
    assert outcome.missing_keys == ["factor", "inner.weight"]


class Whole(nn.Module):
    """A local layer with a remote one behind it."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.remote = remote

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.remote(self.own(value))
        return result


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 4.0)


def test_a_remote_module_is_part_of_a_larger_one() -> None:
    remote = RemoteModule(FIRST, Scale, args=(2.0,))
    assert isinstance(remote, nn.Module)
    whole = Whole(remote)
    assert local_parameters(whole) == list(whole.own.parameters())
    value = torch.ones(2)
    assert torch.equal(whole(value), whole.own(value) * 2)
    whole.eval()
    assert remote.get_module_rref().rpc_sync().describe()[0] is False
    assert list(whole.state_dict()) == list(Whole(Scale(1.0)).state_dict())
    local = Whole(Scale(9.0))
    whole.load_state_dict(local.state_dict())
    assert remote.state_dict()["factor"].item() == 9.0
    local.load_state_dict(whole.state_dict())
    whole.apply(fill)
    assert remote.state_dict()["inner.weight"].item() == whole.own.bias[0].item() == 4.0
    assert "RRef" in repr(whole)


def test_it_travels_and_hands_on_a_reference() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,)).eval()
    assert rpc.rpc_sync(SECOND, call_module, args=(module, torch.ones(1))).tolist() == [2.0]
    back = rpc.rpc_sync(SECOND, copy.copy, args=(module,))
    assert back.training is False
    assert (back.on, back(torch.ones(1)).item()) == (FIRST, 2.0)
    with pytest.raises(SerializationError, match="to_here"):
        torch.save(module, io.BytesIO())


def test_a_module_that_exists_can_be_wrapped() -> None:
    rref = rpc.remote(FIRST, Scale, args=(2.0,))
    for module in (
        RemoteModule.from_module_rref(rref),
        RemoteModule.init_from_module_rref(FIRST, rref),
        RemoteModule.init_from_module_rref("rank:1/cpu", rref),
    ):
        assert module(torch.ones(1)).item() == 2.0
    with pytest.raises(ConfigurationError, match="'worker1'"):
        RemoteModule.init_from_module_rref(SECOND, rref)
    with pytest.raises(ArgumentTypeError, match="pass an RRef"):
        RemoteModule.from_module_rref(Scale(1.0))  # type: ignore[arg-type]


def test_a_module_may_be_on_this_worker() -> None:
    module = RemoteModule("driver", Scale, args=(2.0,))
    value = torch.tensor([3.0], requires_grad=True)
    with context() as context_id:
        backward(context_id, [module(value).sum()])
        assert get_gradients(context_id)[value].tolist() == [2.0]


# Chains


def test_a_chain_is_the_calls_one_after_the_other() -> None:
    module, other = (RemoteModule(FIRST, Scale, args=(factor,)) for factor in (2.0, 5.0))
    doubled = module.then(add, torch.ones(2), weight=3.0)
    chain = doubled.then(other).then(other.get_module_rref(), times=2).then(torch.sum)
    value = torch.tensor([1.0, 2.0])
    expected = ((value * 2 + 3) * 5 * 10).sum()
    assert chain(value) == expected
    assert chain.forward_async(value).wait() == expected
    assert chain.forward_remote(value).to_here() == expected
    assert doubled(value).tolist() == [5.0, 7.0]
    assert repr(chain).endswith(".then(sum)>")


def test_a_chain_stays_on_one_worker() -> None:
    module, other = (RemoteModule(worker, Scale, args=(1.0,)) for worker in (FIRST, SECOND))
    with pytest.raises(ConfigurationError, match="not on worker 'worker0'"):
        module.then(other)
    with pytest.raises(ArgumentTypeError, match="cannot be called"):
        module.then(3)  # type: ignore[arg-type]


def test_gradients_flow_through_a_chain_to_all_its_arguments() -> None:
    decoder = RemoteModule(FIRST, nn.Linear, args=(4, 9))
    local = nn.Linear(4, 9)
    local.load_state_dict(decoder.state_dict())
    hidden, offset = torch.randn(6, 4, requires_grad=True), torch.randn(9, requires_grad=True)
    targets = torch.arange(6)
    parameters = decoder.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with context() as context_id:
        loss = decoder.then(add, offset).then(cross_entropy, targets)(hidden)
        backward(context_id, [loss])
        gradients = get_gradients(context_id)
        optimizer.step(context_id)
    expected = cross_entropy(local(hidden) + offset, targets)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    assert torch.equal(loss, expected)
    for leaf in (hidden, offset):
        assert leaf.grad is not None
        assert torch.equal(gradients[leaf], leaf.grad)
    for reference, parameter in zip(parameters, local.parameters(), strict=True):
        assert torch.equal(reference.to_here(), parameter)


def test_a_loss_may_stay_where_it_is_and_be_backpropagated_from_there() -> None:
    decoder = RemoteModule(FIRST, Scale, args=(2.0,))
    hidden = torch.ones(3, requires_grad=True)
    with context() as context_id:
        loss = decoder.then(torch.sum).forward_remote(hidden)
        loss.backward(context_id)
        assert get_gradients(context_id)[hidden].tolist() == [2.0] * 3


def moved(call: Any) -> int:
    before = rpc.traffic()
    call()
    after = rpc.traffic()
    return sum(after) - sum(before)


def test_with_the_loss_on_the_owner_no_logits_travel() -> None:
    words, width, vocabulary = 64, 16, 5_000
    decoder = RemoteModule(FIRST, nn.Linear, args=(width, vocabulary))
    hidden = torch.randn(words, width, requires_grad=True)
    targets = torch.randint(vocabulary, (words,))

    def with_logits() -> None:
        with context() as context_id:
            backward(context_id, [cross_entropy(decoder(hidden), targets)])

    def with_loss() -> None:
        with context() as context_id:
            backward(context_id, [decoder.then(cross_entropy, targets)(hidden)])

    assert moved(with_logits) > 2 * 4 * words * vocabulary
    content = 2 * 4 * words * width + 8 * words
    assert moved(with_loss) < content + 4096


def test_errors_within_a_chain_keep_their_type() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    with pytest.raises(ZeroDivisionError):
        module.then(divide_by_zero)(torch.ones(1))


def divide_by_zero(value: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_method_that_makes_no_sense_names_the_alternative() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    with pytest.raises(ValueError, match=r"Method ``parameters`` not .*remote_parameters\(\)"):
        module.parameters()
    with pytest.raises(ConfigurationError, match="RemoteModule\\('worker/cuda:0'"):
        module.cuda()
