from __future__ import annotations

import types

import pytest
import torch

from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize.devices import HOST, device_code, device_of


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    two = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: two)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", "xpu:1"])
def test_a_device_that_is_here_is_found(device: str) -> None:
    assert device_of(device_code(torch.device(device)), 0, "w") == torch.device(device)


def test_the_host_needs_no_device() -> None:
    assert device_code(torch.device("cpu")) == device_code(torch.device("cpu", 0)) == HOST
    assert device_of(HOST, 0, "w") is None


@pytest.mark.usefixtures("two_devices")
def test_a_missing_device_says_what_is_here() -> None:
    with pytest.raises(SerializationError, match="'w' has only cuda:0, cuda:1") as caught:
        device_of(device_code(torch.device("cuda:2")), 4, "w")
    assert "tensor 4" in str(caught.value)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(SerializationError, match=r"meta.*\.cpu\(\)"):
        device_code(torch.device("meta"))
    with pytest.raises(ProtocolError):
        device_of((200, 0), 0, "w")
    with pytest.raises(SerializationError, match="no hpu device"):
        device_of(device_code(torch.device("hpu:0")), 0, "w")
