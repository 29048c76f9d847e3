"""Tests answers and refusals of a compat remote module that need no call to a worker."""

from __future__ import annotations

import pytest
from torch import nn

from torchweft.compat.remote_module import (
    _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING,
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    RemoteModule,
    _SerializedRemoteModule,
)
from torchweft.errors import ConfigurationError
from torchweft.nn.remote_module import ALTERNATIVES


class Unbound(RemoteModule):
    """A remote module without a module, with as few attributes as a received one."""

    def __init__(self) -> None:
        vars(self).update(on="ps")


def test_refusals_begin_as_in_torch() -> None:
    refused = "apply load_state_dict requires_grad_ register_forward_hook extra_repr".split()
    for name in {*refused, *ALTERNATIVES, "named_modules", "state_dict"}:
        with pytest.raises(ValueError, match=f"^Method ``{name}`` not supported for RemoteModule"):
            getattr(Unbound(), name)()


def test_it_has_what_a_module_needs_though_it_was_never_initialized() -> None:
    remote = Unbound()
    assert vars(remote) == {"on": "ps"}
    for name, value in vars(nn.Module()).items():
        assert getattr(remote, name) == value
    with pytest.raises(TypeError):
        remote._modules["part"] = nn.Linear(1, 1)  # Otherwise all remote modules would have it.


def test_what_is_sent_and_what_is_not_are_said_apart() -> None:
    assert _SerializedRemoteModule._fields == _REMOTE_MODULE_PICKLED_ATTRIBUTES
    sent = set(_REMOTE_MODULE_PICKLED_ATTRIBUTES)
    assert not sent & set(_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING)


def test_without_an_interface_it_cannot_be_scripted() -> None:
    with pytest.raises(ConfigurationError, match="no TorchScript interface"):
        Unbound().__prepare_scriptable__()
