"""Tests the accepted forms of ``remote_device``."""

from __future__ import annotations

import pytest

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.nn.remote_module import Placement, read_placement


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("ps", Placement("ps", "cpu")),
        ("ps/cpu", Placement("ps", "cpu")),
        ("ps/cuda:1", Placement("ps", "cuda:1")),
        ("rank:0", Placement(0, "cpu")),
        ("rank:12/cuda", Placement(12, "cuda")),
        ("host/ps/cpu", Placement("host/ps", "cpu")),
    ],
)
def test_forms_that_are_understood(text: str, placement: Placement) -> None:
    assert read_placement(text) == placement


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


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="is 3, an int; pass a string"):
        read_placement(3)
