"""Tests answers and refusals of a compat remote module that need no call to a worker."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from torchweft.compat.remote_module import (
    _REFUSED,
    _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING,
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    RemoteModule,
    _RemoteModule,
    _SerializedRemoteModule,
)
from torchweft.errors import ConfigurationError, SerializationError
from torchweft.nn.remote_module import ALTERNATIVES


class Unbound(RemoteModule):
    """A remote module without a module, with as few attributes as a received one."""

    def __init__(self) -> None:
        vars(self).update(on="ps")


def test_refusals_begin_as_in_torch() -> None:
    for name in {*_REFUSED, *ALTERNATIVES, "named_modules", "state_dict"}:
        with pytest.raises(ValueError, match=f"^Method ``{name}`` not supported for RemoteModule"):
            getattr(Unbound(), name)()


def test_a_module_around_it_is_refused_what_would_leave_it_out_as_in_torch() -> None:
    whole = nn.Sequential(nn.Linear(1, 1), Unbound())
    assert list(whole.children()) == [whole[0], whole[1]]
    for use in (whole.modules, whole.parameters, whole.buffers):
        with pytest.raises(ValueError, match=r"^Method ``named_modules`` not supported"):
            list(use())


def test_it_has_what_a_module_needs_though_it_was_never_initialized() -> None:
    remote = Unbound()
    assert vars(remote) == {"on": "ps"}
    for name, value in vars(nn.Module()).items():
        assert getattr(remote, name) == value
    with pytest.raises(TypeError):
        remote._modules["part"] = nn.Linear(1, 1)  # Otherwise all remote modules would have it.


def test_only_an_rpc_takes_it_along() -> None:
    with pytest.raises(SerializationError, match="can only be pickled when using RPC"):
        copy.copy(Unbound())


def test_what_is_sent_and_what_is_not_are_said_apart() -> None:
    assert _SerializedRemoteModule._fields == _REMOTE_MODULE_PICKLED_ATTRIBUTES
    sent = set(_REMOTE_MODULE_PICKLED_ATTRIBUTES)
    assert not sent & set(_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING)


def test_without_an_interface_it_cannot_be_scripted() -> None:
    with pytest.raises(ConfigurationError, match="no TorchScript interface"):
        Unbound().__prepare_scriptable__()


@pytest.mark.parametrize("place", ["/", "", "/cpu", "ps/cpu/cpu"])
def test_a_place_without_worker_and_device_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=f"Could not parse remote_device: {place}. The valid"):
        RemoteModule(place, nn.Linear)


@pytest.mark.parametrize("kind", [RemoteModule, _RemoteModule])
@pytest.mark.parametrize(
    ("place", "message"), [("ps/", "must not be empty"), ("ps/oven", "start of device string")]
)
def test_a_device_that_is_none_is_refused_by_torch(kind: Any, place: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        kind(place, nn.Linear)
