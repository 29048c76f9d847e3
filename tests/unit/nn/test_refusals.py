"""Tests the methods that a remote module refuses."""

from __future__ import annotations

import pytest
from torch import nn

from torchweft.errors import ConfigurationError
from torchweft.nn import RemoteModule
from torchweft.nn.remote_module import ALTERNATIVES


class Unbound(RemoteModule):
    """A remote module without a module."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.on = "ps"


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_each_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Method ``{name}`` not supported.*'ps': ") as e:
        getattr(Unbound(), name)(1, key=2)
    assert str(e.value).endswith(ALTERNATIVES[name].format(name=name))
    assert getattr(RemoteModule, name).__doc__.startswith("Raises ConfigurationError: ")


def test_all_of_them_are_methods_of_torch() -> None:
    newer = {"mtia", "to_empty", "register_full_backward_pre_hook"}
    assert all(hasattr(nn.Module, name) for name in ALTERNATIVES.keys() - newer)
