"""Device maps as texts: malformed ones, and those that do not fit the group."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tables import cases
from torchweft.engine.protocol.registration import (
    DEVICES,
    NO_DEVICES,
    DeviceNames,
    Devices,
    Registration,
    check_devices,
)
from torchweft.errors import ConfigurationError, ProtocolError

CUDA = [f"cuda:{index}" for index in range(4)]


def settings_of(
    maps: dict[str, DeviceNames] | None = None, *listed: str, count: int | None = 2
) -> Devices:
    return Devices(maps or {}, listed, count)


@cases(
    "told",
    [
        None,
        3,
        {},
        {"maps": {}, "listed": []},
        {"maps": [], "listed": [], "count": None},
        {"maps": {"b": []}, "listed": [], "count": None},
        {"maps": {"b": {"cuda:0": 1}}, "listed": [], "count": None},
        {"maps": {"b": {"cuda": "cuda:0"}}, "listed": [], "count": None},
        {"maps": {"b": {"cuda:0": "cuda:00"}}, "listed": [], "count": None},
        {"maps": {"b": {"cuda:0": "cuda:1000"}}, "listed": [], "count": None},
        {"maps": {"b": {"cuda:-1": "cpu"}}, "listed": [], "count": None},
        {"maps": {}, "listed": 3, "count": None},
        {"maps": {}, "listed": [3], "count": None},
        {"maps": {}, "listed": ["mps"], "count": None},
        {"maps": {}, "listed": [], "count": -1},
        {"maps": {}, "listed": [], "count": True},
        {"maps": {}, "listed": [], "count": "2"},
        {"maps": {}, "listed": [], "count": 1001},
        {"maps": {}, "listed": ["cuda:1\u0663"], "count": None},
    ],
)
def test_malformed_settings_make_a_registration_malformed(told: Any) -> None:
    registration = {**Registration("a", 0, ()).as_json(), "facts": {DEVICES: told}}
    with pytest.raises(ProtocolError, match="registration is malformed"):
        Registration.decode(json.dumps(registration).encode())


FITTING = {
    "worker0": settings_of({"worker1": {"cuda:0": "cuda:1", "cpu": "cpu"}, "worker0": {}}),
    "worker1": settings_of({"worker0": {"cuda:0": "cpu"}}, "cuda:0", "cuda:1"),
    "worker2": settings_of({"worker1": {"cpu": "cuda:0"}}, count=0),
    "worker3": NO_DEVICES,
}


@cases(
    ("wrong", "message"),
    [
        (
            settings_of({"none_exist": {"cuda:0": "cuda:1"}}),
            r"Node worker0 has invalid target node names in its device maps: 'none_exist'; "
            "the group has 'worker0', 'worker1', 'worker2', 'worker3'",
        ),
        (
            settings_of({"worker1": {"cuda:2": "cuda:0"}}),
            "Node worker0 has source devices with invalid indices in its device map for worker1 "
            r"\(cuda:2 to cuda:0\); worker 'worker0' has cuda:0, cuda:1",
        ),
        (
            settings_of({"worker2": {"cuda:0": "cuda:0"}}),
            "Node worker0 has target devices with invalid indices in its device map for worker2.*"
            "worker 'worker2' has no CUDA device",
        ),
        (
            settings_of({"worker0": {"cuda:0": "cuda:2"}}),
            "Node worker0 has target devices with invalid indices in its device map for worker0",
        ),
        (
            settings_of({"worker1": {"cuda:1": "cuda:0", "cuda:0": "cuda:0"}}),
            "Node worker0 has duplicated target devices in its device map for worker1",
        ),
        (
            settings_of({"worker1": {"cuda:0": "cuda:0"}}, "cuda:1"),
            "Node worker0 has unexpected source devices in its device map for worker1.*"
            "worker 'worker0' lists cuda:1 as its devices",
        ),
        (
            settings_of({"worker1": {"cuda:0": "cuda:3"}}),
            "Node worker0 has unexpected target devices in its device map for worker1.*"
            "worker 'worker1' lists cuda:0, cuda:1",
        ),
        (
            settings_of({}, "cuda:0", "cuda:0"),
            "Node worker0 has duplicated devices: cuda:0, cuda:0",
        ),
        (settings_of({}, "cuda:2"), "Node worker0 has devices with invalid indices: cuda:2"),
    ],
)
def test_settings_that_do_not_fit(wrong: Devices, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_devices({**FITTING, "worker0": wrong}, is_open=False)
    assert isinstance(caught.value, ValueError)
