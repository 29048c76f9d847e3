"""The remote module of ``torchweft.compat`` on real workers, beside that of ``torchweft.nn``."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from torchweft import rpc
from torchweft.compat.remote_module import (
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    RemoteModule,
)
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery

# Each test shares the workers of the file; they connect to one another when they first talk.
pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
]
FIRST, SECOND = "worker0", "worker1"


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, value: Tensor, times: int) -> tuple[Tensor, int]:
        return value * self.factor * times, times


class Whole(nn.Module):
    """A local layer beside a remote one."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.remote = remote


def attributes_of(module: RemoteModule) -> tuple[list[str], bool]:
    return list(vars(module)), module.training


def use(module: RemoteModule, value: Tensor) -> tuple[Any, ...]:
    """Uses a received remote module, also as a part of another module."""
    whole = Whole(module)
    return module(value, 2), module.forward(value, times=3), list(whole.state_dict()), repr(module)


def test_it_is_called_as_in_torch() -> None:
    module = RemoteModule(f"{FIRST}/cpu", Scale, (2.0,))
    assert module(torch.ones(1), 2)[0].item() == 4.0
    assert module.forward_async(torch.ones(1), times=3).wait()[0].item() == 6.0
    assert (module.on, module.device) == (FIRST, "cpu")
    assert (module.is_device_map_set, module.is_scriptable) == (False, False)
    assert [function.__name__ for function in module.generated_methods] == [
        "forward_async",
        "forward",
    ]
    assert module.get_module_rref() is module.module_rref
    assert len(module.remote_parameters()) == 1


def test_it_refuses_what_torch_refuses() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    for name in ("apply", "cuda", "extra_repr", "load_state_dict", "modules", "named_modules"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    for name in ("register_forward_hook", "register_forward_pre_hook", "state_dict"):
        with pytest.raises(ConfigurationError, match=f"Method ``{name}`` not supported"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()


def test_a_module_around_it_still_reaches_it() -> None:
    remote = RemoteModule(FIRST, Scale, args=(2.0,))
    whole = Whole(remote)
    assert list(whole.children()) == [whole.own, remote]
    with pytest.raises(ValueError, match="Method ``named_modules`` not supported"):
        list(whole.modules())
    state = whole.state_dict()
    assert state["remote.factor"].item() == 2.0
    whole.load_state_dict({**state, "remote.factor": torch.tensor(5.0)})
    assert remote(torch.ones(1), 1)[0].item() == 5.0
    whole.eval()
    assert remote.get_module_rref().to_here().training is False
    assert FIRST in repr(whole)


def test_it_travels_with_these_attributes_and_no_others() -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,)).eval()
    expected = [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert rpc.rpc_sync(SECOND, attributes_of, (module,)) == ([*expected, "training"], False)
    assert rpc.rpc_sync(SECOND, attributes_of, (module.train(),)) == (expected, True)
    called, forwarded, state, text = rpc.rpc_sync(SECOND, use, (module, torch.ones(1)))
    assert (called[0].item(), forwarded[0].item()) == (4.0, 6.0)
    assert state == ["own.weight", "own.bias", "remote.factor"]
    assert text.startswith("RemoteModule(")
    module.extra = 1
    with pytest.warns(UserWarning, match="new attribute ``extra`` .* is ignored"):
        assert "extra" not in rpc.rpc_sync(SECOND, attributes_of, (module,))[0]


def test_it_is_no_cycle_so_its_reference_goes_with_the_last_user() -> None:
    made = RemoteModule(FIRST, Scale, args=(2.0,))
    wrapped = RemoteModule.init_from_module_rref(FIRST, made.get_module_rref())
    gc.disable()
    try:
        alive = [weakref.ref(made), weakref.ref(wrapped)]
        del made, wrapped
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "put", [pickle.dumps, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())]
)
def test_it_goes_nowhere_else(put: Any) -> None:
    module = RemoteModule(FIRST, Scale, args=(2.0,))
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        put(module)


def test_a_module_that_exists_is_called_where_it_is() -> None:
    rref = RemoteModule(FIRST, Scale, args=(2.0,)).get_module_rref()
    module = RemoteModule.init_from_module_rref(FIRST, rref)
    assert module(torch.ones(1), 1)[0].item() == 2.0
    with pytest.warns(UserWarning, match="another worker than 'worker0'"):
        misplaced = RemoteModule.init_from_module_rref(f"{SECOND}/cpu", rref)
    assert misplaced.on == FIRST
    assert misplaced(torch.ones(1), 1)[0].item() == 2.0


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("/cpu", ValueError, "Could not parse remote_device: /cpu. The valid format is"),
        ("worker0/cpu/cpu", ValueError, "Could not parse remote_device"),
        ("worker0/toaster", RuntimeError, "device type at start of device string"),
        ("worker0/", RuntimeError, "Device string must not be empty"),
    ],
)
def test_a_place_that_is_none(place: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RemoteModule(place, Scale, args=(2.0,))


def test_what_makes_no_module_is_refused() -> None:
    expected = (
        r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>,"
    )
    for wrong in (dict, make_number):
        with pytest.raises(ValueError, match=expected):
            RemoteModule(FIRST, wrong)  # type: ignore[arg-type]


def make_number() -> int:
    return 3
