"""Modules that contain remote modules: each method as in one process, or refused with a reason.

The table is in ``docs/api/nn.md``.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.compat.remote_module import RemoteModule as CompatRemoteModule
from torchweft.errors import ConfigurationError, SerializationError
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule, local_parameters
from torchweft.optim import DistributedOptimizer

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
FIRST, SECOND = "worker0", "worker1"
PAGE = Path(__file__).parents[3] / "docs" / "api" / "nn.md"
INPUTS = torch.arange(6.0).view(3, 2) / 6


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


class Part(nn.Module):
    """A layer with a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))
        self.note = "new"

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.inner(value) * self.scale
        return result

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


class Whole(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Linear(2, 2)
        self.part = part

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.part(torch.tanh(self.own(value)))
        return result


def make() -> tuple[Whole, Whole]:
    """Returns a module with a remote part, and the same in this process."""
    return Whole(RemoteModule(FIRST, Part)), Whole(Part())


def read(module: nn.Module, name: str) -> Any:
    return getattr(module, name)


def seen(reference: rpc.RRef[Any], name: str) -> Any:
    return read(reference.local_value(), name)


def property_of(part: RemoteModule, name: str) -> Any:
    """Returns an attribute of a remote module, from its owner."""
    return rpc.rpc_sync(part.on, seen, (part.get_module_rref(), name))


def kinds_in(module: nn.Module) -> dict[str, Any]:
    return {
        key: (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else value
        for key, value in module.state_dict().items()
    }


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    found, wanted = module.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "half": nn.Module.half,
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "type": lambda module: module.type(torch.float64),
    "to a type": lambda module: module.to(torch.float64),
    "to a type and this device": lambda module: module.to("cpu", torch.float16),
    "to a layout": lambda module: module.to(memory_format=torch.channels_last),
    "cpu": nn.Module.cpu,
    "float": nn.Module.float,
    "share_memory": nn.Module.share_memory,
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_conversions_reach_the_remote_part(convert: Callable[[nn.Module], object]) -> None:
    whole, alone = make()
    parameters = whole.part.remote_parameters()  # type: ignore[operator]
    assert convert(whole) is whole
    convert(alone)
    assert_same(whole, alone)
    for reference, parameter in zip(parameters, alone.part.parameters(), strict=True):
        assert torch.equal(reference.to_here(), parameter)
        assert reference.to_here().dtype is parameter.dtype


def test_memory_is_made_anew_on_the_owner() -> None:
    whole, alone = make()
    whole.to_empty(device="cpu")
    assert kinds_in(whole) == kinds_in(alone)


def test_a_part_in_another_precision_trains_on() -> None:
    whole, alone = make()
    references = [*whole.part.remote_parameters(), *map(rpc.RRef, local_parameters(whole))]  # type: ignore[operator]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    local = torch.optim.SGD(alone.parameters(), lr=0.1)
    whole.double()
    alone.double()
    for _ in range(2):
        with context() as context_id:
            backward(context_id, [whole(INPUTS.double()).sum()])
            optimizer.step(context_id)
        local.zero_grad()
        alone(INPUTS.double()).sum().backward()
        local.step()
    assert_same(whole, alone)


def test_another_device_is_refused_by_name() -> None:
    whole, _ = make()
    with pytest.raises(ConfigurationError, match=r"'cpu' of worker 'worker0'.*'meta'"):
        whole.to("meta")
    assert kinds_in(whole.part)["inner.weight"][1].type == "cpu"


GONE_THROUGH: dict[str, Callable[[Any], object]] = {
    "parameters": lambda whole: list(whole.parameters()),
    "named_parameters": lambda whole: list(whole.named_parameters()),
    "buffers": lambda whole: list(whole.buffers()),
    "named_buffers": lambda whole: list(whole.named_buffers()),
    "modules": lambda whole: list(whole.modules()),
    "named_modules": lambda whole: list(whole.named_modules()),
    "requires_grad_": lambda whole: whole.requires_grad_(False),
    "zero_grad": lambda whole: whole.zero_grad(),
    "an optimizer": lambda whole: torch.optim.SGD(whole.parameters(), lr=0.1),
    "clipping": lambda whole: nn.utils.clip_grad_norm_(whole.parameters(), 1.0),
    "functional_call": lambda whole: torch.func.functional_call(whole, {}, (INPUTS,)),
    "in a list": lambda whole: nn.ModuleList([whole.part]).requires_grad_(False),
    "in a dict": lambda whole: nn.ModuleDict({"part": whole.part}).requires_grad_(False),
    "in a sequence": lambda whole: nn.Sequential(whole.part, nn.ReLU()).requires_grad_(False),
    "deep within": lambda whole: nn.Sequential(nn.Sequential(whole)).requires_grad_(False),
}


@pytest.mark.parametrize("kind", [RemoteModule, CompatRemoteModule])
@pytest.mark.parametrize("use", GONE_THROUGH.values(), ids=GONE_THROUGH)
def test_what_would_leave_out_the_remote_part_is_refused(
    use: Callable[[Any], object], kind: type[RemoteModule]
) -> None:
    whole = Whole(kind(FIRST, Part))
    with pytest.raises(ValueError, match=r"'worker0': modules\(\).*local_parameters") as caught:
        use(whole)
    assert isinstance(caught.value, ConfigurationError)


def test_wrappers_for_data_parallelism_are_refused() -> None:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    whole, _ = make()
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
            with pytest.raises(ConfigurationError, match="local_parameters"):
                wrap(whole)
    finally:
        destroy_process_group()


def test_local_parameters_are_those_that_are_here() -> None:
    whole, alone = make()
    shared = nn.Sequential(whole, alone, whole.own)
    expected = [*whole.own.parameters(), *alone.parameters()]
    assert [id(each) for each in local_parameters(shared)] == [id(each) for each in expected]
    assert local_parameters(whole.part) == []


def test_both_parts_can_be_frozen() -> None:
    whole, _ = make()
    part = whole.part
    assert isinstance(part, RemoteModule)
    optimizer = DistributedOptimizer(torch.optim.SGD, part.remote_parameters(), lr=1.0)
    before = whole.state_dict()
    assert part.requires_grad_(False) is part
    with context() as context_id:
        backward(context_id, [whole(INPUTS).sum()])
        assert len(get_gradients(context_id)) == 2
        with pytest.warns(RuntimeWarning, match="changed nothing"):
            optimizer.step(context_id)
    assert torch.equal(whole.state_dict()["part.inner.weight"], before["part.inner.weight"])
    part.requires_grad_()
    with context() as context_id:
        backward(context_id, [whole(INPUTS).sum()])
        optimizer.step(context_id)
    assert not torch.equal(whole.state_dict()["part.inner.weight"], before["part.inner.weight"])


def test_modes_and_functions_reach_the_remote_part() -> None:
    whole, _ = make()
    assert whole.eval() is whole
    assert property_of(whole.part, "training") is False  # type: ignore[arg-type]
    whole.train()
    assert property_of(whole.part, "training") is True  # type: ignore[arg-type]
    whole.apply(rename)
    assert property_of(whole.part, "note") == "applied"  # type: ignore[arg-type]


def rename(module: nn.Module) -> None:
    if isinstance(module, Part):
        module.note = "applied"


def test_states_go_both_ways_with_hooks_and_extra_state() -> None:
    whole, alone = make()
    rename(alone.part)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.fill_(0.5)
    called: list[str] = []
    whole.register_state_dict_pre_hook(lambda *_: called.append("before saving"))
    whole.register_state_dict_post_hook(lambda *_: called.append("after saving"))
    whole.register_load_state_dict_pre_hook(lambda *_: called.append("before loading"))
    whole.register_load_state_dict_post_hook(lambda *_: called.append("after loading"))
    whole.load_state_dict(alone.state_dict())
    assert_same(whole, alone)
    assert property_of(whole.part, "note") == "applied"  # type: ignore[arg-type]
    assert called == ["before loading", "after loading", "before saving", "after saving"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"part\.inner\.weight"'):
        whole.load_state_dict(whole.own.state_dict(prefix="own."))
    outcome = whole.load_state_dict(whole.own.state_dict(prefix="own."), strict=False)
    assert "part.inner.weight" in outcome.missing_keys


def test_a_state_can_be_assigned_to_both_parts() -> None:
    whole, alone = make()
    state = alone.double().state_dict()
    whole.load_state_dict(state)
    assert kinds_in(whole)["part.inner.weight"][0] is torch.float32
    whole.load_state_dict(state, assign=True)
    assert kinds_in(whole) == kinds_in(alone)


def test_parameters_of_a_state_cannot_be_the_remote_ones() -> None:
    whole, _ = make()
    with pytest.raises(ConfigurationError, match=r"keep_vars=True.*'worker0'"):
        whole.state_dict(keep_vars=True)


def test_hooks_see_what_they_see_in_one_process() -> None:
    found: list[list[Any]] = []
    for whole in make():
        seen_here: list[Any] = []

        def note(*values: Any, into: list[Any] = seen_here) -> None:
            into.extend(each for value in values[1:] for each in value if each is not None)

        whole.register_forward_pre_hook(note)
        whole.register_forward_hook(note)
        whole.register_full_backward_pre_hook(note)
        whole.register_full_backward_hook(note)
        with context() as context_id:
            backward(context_id, [whole(INPUTS.clone().requires_grad_()).square().sum()])
        found.append(seen_here)
    assert len(found[0]) == len(found[1]) > 3
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


def test_a_remote_module_takes_no_parts_of_its_own() -> None:
    whole, _ = make()
    for value in (nn.Linear(1, 1), nn.Parameter(torch.ones(1)), nn.Buffer(torch.ones(1))):
        with pytest.raises(ConfigurationError, match="made on its owner"):
            whole.part.added = value
    for add in (
        whole.part.register_state_dict_post_hook,
        whole.part.register_load_state_dict_pre_hook,
    ):
        with pytest.raises(ConfigurationError, match="made on its owner"):
            add(print)


def test_children_are_found_and_parts_of_the_remote_one_are_not() -> None:
    whole, _ = make()
    assert [name for name, _ in whole.named_children()] == ["own", "part"]
    assert list(whole.children()) == [whole.own, whole.part]
    assert whole.get_submodule("part") is whole.part
    assert whole.get_parameter("own.weight") is whole.own.weight
    for find, name in (
        (whole.get_submodule, "part.inner"),
        (whole.get_parameter, "part.inner.weight"),
        (whole.get_buffer, "part.scale"),
    ):
        with pytest.raises(AttributeError, match="RemoteModule has no attribute"):
            find(name)
    whole.add_module("more", RemoteModule(SECOND, Part))
    assert "more.inner.weight" in whole.state_dict()
    del whole.more
    assert "worker0" in repr(whole)


def test_copies_and_what_is_written() -> None:
    whole, _ = make()
    again = copy.deepcopy(whole)
    assert_same(again, whole)
    again.double()
    assert kinds_in(whole)["part.inner.weight"][0] is torch.float32
    for write in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(SerializationError):
            write(whole)
    there = rpc.rpc_sync(SECOND, Whole.forward, (whole, INPUTS))
    assert torch.equal(there, whole(INPUTS))


def test_every_method_of_a_module_is_in_the_table() -> None:
    text = PAGE.read_text()
    table = text[text.index("| methods of the module around it") :]
    named = {name.partition("(")[0] for name in re.findall(r"`([^`]+)`", table)}
    skipped = {"dump_patches", "call_super_init", "training", "T_destination", "forward"}
    methods = {name for name in dir(nn.Module) if not name.startswith("_")} - skipped
    assert methods <= named
