from __future__ import annotations

import copy
import datetime
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from weft.compat.rpc import options
from weft.compat.rpc.options import (
    IgnoredOptionWarning,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    warn_of_ignored,
)
from weft.errors import ArgumentTypeError, ConfigurationError

CUDA = [torch.device("cuda", index) for index in range(3)]


def test_defaults() -> None:
    made = TensorPipeRpcBackendOptions()
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (16, 60.0, "env://")
    assert (made.device_maps, made.devices) == ({}, [])
    assert isinstance(made, RpcBackendOptions)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("rpc_timeout", 5, 5.0),
        ("rpc_timeout", 0, 0.0),
        ("rpc_timeout", np.float32(1.5), 1.5),
        ("rpc_timeout", float("inf"), float("inf")),
        ("num_worker_threads", np.int64(3), 3),
        ("init_method", "tcp://localhost:1", "tcp://localhost:1"),
    ],
)
def test_values_are_kept_however_they_are_set(name: str, value: Any, kept: Any) -> None:
    by_name = TensorPipeRpcBackendOptions(**{name: value})
    later = TensorPipeRpcBackendOptions()
    setattr(later, name, value)
    for made in (by_name, later):
        assert getattr(made, name) == kept
        assert type(getattr(made, name)) is type(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rpc_timeout", datetime.timedelta(seconds=1)),
        ("rpc_timeout", "1"),
        ("rpc_timeout", None),
        ("num_worker_threads", 1.5),
        ("num_worker_threads", "16"),
        ("num_worker_threads", None),
        ("init_method", 3),
        ("init_method", None),
    ],
)
def test_a_value_of_a_wrong_type(name: str, value: Any) -> None:
    pattern = f"incompatible constructor arguments of TensorPipeRpcBackendOptions: {name} is"
    with pytest.raises(TypeError, match=pattern) as caught:
        TensorPipeRpcBackendOptions(**{name: value})
    assert isinstance(caught.value, ArgumentTypeError)
    made = TensorPipeRpcBackendOptions()
    before = getattr(made, name)
    with pytest.raises(TypeError, match=f"^{name} is"):
        setattr(made, name, value)
    assert getattr(made, name) == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rpc_timeout", -1, "must be non-negative, got -1"),
        ("rpc_timeout", float("nan"), "must be non-negative, got nan"),
        ("num_worker_threads", 0, "must be positive, got 0"),
        ("num_worker_threads", -2, "must be positive, got -2"),
    ],
)
def test_a_value_that_cannot_work(name: str, value: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        TensorPipeRpcBackendOptions(**{name: value})


def test_arguments_go_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        TensorPipeRpcBackendOptions(16)  # type: ignore[misc]


def test_a_class_of_a_program_need_not_call_super() -> None:
    class Options(RpcBackendOptions):
        def __init__(self, init_method: str) -> None:
            RpcBackendOptions.__init__(self)
            self.init_method = init_method

    made = Options("file:///somewhere")
    assert (made.rpc_timeout, made.init_method) == (60.0, "file:///somewhere")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_options_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    made = TensorPipeRpcBackendOptions(rpc_timeout=7, device_maps={"w": {"cuda:0": "cuda:1"}})
    other = duplicate(made)
    other = pickle.loads(other) if isinstance(other, bytes) else other
    assert vars(other) == vars(made)


# Devices


def test_device_maps_are_added_up() -> None:
    made = TensorPipeRpcBackendOptions(device_maps={"a": {"cuda:0": "cuda:1"}})
    made.set_device_map("a", {CUDA[1]: "cuda:2"})
    made.set_device_map("a", {"cuda:0": CUDA[1]})
    made.set_device_map("b", {"cpu": "cuda:0"})
    assert made.device_maps == {
        "a": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[2]},
        "b": {torch.device("cpu"): CUDA[0]},
    }


def test_a_device_has_one_counterpart() -> None:
    made = TensorPipeRpcBackendOptions()
    made.set_device_map("a", {"cuda:0": "cuda:1"})
    with pytest.raises(ValueError, match=r"`set_device_map` only supports 1-to-1 mapping.*cuda:2"):
        made.set_device_map("a", {"cuda:0": "cuda:2"})
    assert made.device_maps == {"a": {CUDA[0]: CUDA[1]}}
    with pytest.raises(ValueError, match=r"`device_map` only supports 1-to-1 mapping.*to cuda:2"):
        made.set_device_map("b", {"cuda:0": "cuda:2", "cuda:1": "cuda:2"})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        TensorPipeRpcBackendOptions(device_maps={"c": {"cuda:0": "cuda:2", "cuda:1": "cuda:2"}})


def test_devices() -> None:
    made = TensorPipeRpcBackendOptions(devices=["cuda:1"])
    assert made.devices == [CUDA[1]]
    made.set_devices(["cuda:0", CUDA[2]])
    assert made.devices == [CUDA[0], CUDA[2]]
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got cpu"):
        made.set_devices(["cpu"])


def test_device_maps_are_checked_against_the_group() -> None:
    made = TensorPipeRpcBackendOptions()
    made.set_device_map("a", {"cuda:0": "cuda:1"})
    made.check_device_maps("me", ["me", "a"])
    made.set_device_map("nobody", {"cuda:0": "cuda:1"})
    with pytest.raises(
        ValueError, match=r"me has invalid target node names.*'nobody'; .*'a', 'me'"
    ):
        made.check_device_maps("me", ["me", "a"])
    made.check_device_maps("me", None)
    made = TensorPipeRpcBackendOptions()
    made.set_device_map("a", {"cuda:1": "cuda:0"})
    made.set_device_map("a", {"cuda:0": "cuda:0"})
    with pytest.raises(
        ConfigurationError, match="duplicated target devices in its device map for a"
    ):
        made.check_device_maps("me", ["me", "a"])


# What has no effect


@pytest.fixture
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_has_warned", False)


@pytest.mark.usefixtures("_unwarned")
def test_what_has_no_effect_is_said_once() -> None:
    made = TensorPipeRpcBackendOptions(
        devices=["cuda:0"],
        device_maps={"a": {"cuda:0": "cuda:1"}},
        _transports=["uv"],
        _channels=["basic"],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored(made)
        warn_of_ignored(made)
    (warning,) = caught
    assert warning.category is IgnoredOptionWarning
    for name in ("_transports", "_channels", "devices", "device_maps"):
        assert name in str(warning.message)


@pytest.mark.usefixtures("_unwarned")
@pytest.mark.parametrize(
    "made",
    [
        TensorPipeRpcBackendOptions(),
        TensorPipeRpcBackendOptions(_transports=None, _channels=None, devices=None),
        TensorPipeRpcBackendOptions(num_worker_threads=2, rpc_timeout=3),
        TensorPipeRpcBackendOptions(device_maps={"a": {"cuda:0": "cuda:0"}}),
    ],
    ids=["defaults", "none", "others", "same device"],
)
def test_what_has_an_effect_is_not_said(made: TensorPipeRpcBackendOptions) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored(made)
    assert not caught
