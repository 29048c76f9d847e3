"""Tests moving arguments to the device of a module."""

from __future__ import annotations

from collections import namedtuple

import torch

from torchweft.nn.owner import to_device

Pair = namedtuple("Pair", "first second")


def test_host_arguments_are_moved_within_plain_containers() -> None:
    tensor, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    moved = to_device([tensor, ({"a": tensor}, elsewhere), 3], "meta")
    assert moved[0].device.type == moved[1][0]["a"].device.type == "meta"
    assert moved[1][1] is elsewhere
    assert moved[2] == 3
    pair = Pair(tensor, 2)
    assert to_device(pair, "meta") is pair


def test_nothing_is_touched_for_a_module_on_the_host() -> None:
    arguments = (torch.ones(2), torch.ones(2, device="meta"))
    assert to_device(arguments, "cpu") is arguments
