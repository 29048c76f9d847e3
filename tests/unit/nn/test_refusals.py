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


def test_each_says_what_to_do_instead() -> None:
    for name, alternative in ALTERNATIVES.items():
        expected = f"Method ``{name}`` not supported.*'ps': "
        with pytest.raises(ConfigurationError, match=expected) as caught:
            getattr(Unbound(), name)(1, key=2)
        assert str(caught.value).endswith(alternative.format(name=name))
        assert getattr(RemoteModule, name).__doc__.startswith("Raises ConfigurationError: ")
