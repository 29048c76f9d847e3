"""Tests the refused forms of ``remote_device``."""

from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.nn.remote_module import read_placement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no worker"),
        ("/cpu", "names no worker"),
        ("rank:x", "'x' in remote_device 'rank:x' is no rank"),
        ("rank:-1/cpu", "'-1' in .* is no rank"),
        ("ps/toaster", "'toaster' in remote_device 'ps/toaster' is no device"),
        ("ps/", "'' in remote_device 'ps/' is no device"),
    ],
)
def test_others_are_refused_with_the_forms(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{message}.*pass 'worker', 'worker/cuda:0'"):
        read_placement(text)
