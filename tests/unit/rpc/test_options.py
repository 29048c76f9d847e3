from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.tables import cases
from torchweft import rpc
from torchweft.engine.worker.current import is_set
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
)


@cases(
    ("fields", "name"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads"),
        ({"rpc_timeout": -1.0}, "rpc_timeout"),
        ({"rpc_timeout": math.nan}, "rpc_timeout"),
        ({"init_timeout": 0.0}, "init_timeout"),
        ({"init_timeout": math.inf}, "init_timeout"),
        ({"init_timeout": math.nan}, "init_timeout"),
        ({"store": HashStore(), "init_method": "env://"}, "init_method or store"),
        ({"allowed_modules": "torch"}, "allowed_modules"),
        ({"allowed_modules": 3}, "allowed_modules"),
        ({"allowed_modules": ("torch", 3)}, "allowed_modules has 3"),
        ({"allowed_modules": ("my-package",)}, "'my-package'"),
        ({"allowed_modules": ("",)}, "allowed_modules"),
        ({"allowed_modules": ("builtins",)}, "eval"),
        ({"allowed_modules": ["torchweft"]}, "needs no entry"),
        ({"allowed_modules": ["torchweft.compat"]}, "needs no entry"),
        ({"strict": True, "allowed_modules": ("torch",)}, "callables="),
        ({"strict": True, "allowed_modules": ()}, "callables="),
        ({"callables": (math.sqrt,)}, "strict=True"),
        ({"strict": True, "callables": "math"}, "callables is .math., a str"),
        ({"strict": True, "callables": 3}, "callables is 3, an int"),
        ({"strict": True, "callables": (math.sqrt, "math")}, "this is a str"),
        ({"strict": True, "callables": (lambda: 1,)}, "has no name"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        RpcBackendOptions(**fields).check()


CUDA = [torch.device("cuda", index) for index in range(3)]


@cases(
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


# Devices


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


@cases(
    ("fields", "message"),
    [
        ({"device_maps": 3}, "device_maps is 3"),
        ({"device_maps": {3: {}}}, "a key of device_maps is 3"),
        ({"device_maps": {"a": ["cuda:0"]}}, "the device map for 'a' is"),
        ({"device_maps": {"a": {"cuda": "cuda:0"}}}, "'cuda', without an index"),
        ({"device_maps": {"a": {"cuda:0": "mps"}}}, "have mps; they map the CPU and CUDA"),
        ({"device_maps": {"a": {"cuda:0": "gpu"}}}, "'gpu' is no device"),
        ({"devices": "cuda:0"}, "devices is 'cuda:0'"),
        ({"devices": 3}, "devices is 3"),
        ({"devices": ["cpu"]}, "expect a list of CUDA devices, but got cpu"),
        ({"devices": ["cuda"]}, "without an index"),
        ({"unmapped_devices": "cpu"}, "unmapped_devices is 'cpu'; pass one of 'same', 'refuse'"),
        ({"other_versions": "no"}, "other_versions is 'no'; pass one of 'refuse', 'warn'"),
    ],
)
def test_devices_that_cannot_be_meant(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RpcBackendOptions(**fields).check()


# Options in a group


def test_a_device_map_for_nobody_ends_the_joining(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path / 'store'}", device_maps={"nobody": {"cpu": "cpu"}}
    )
    with pytest.raises(ConfigurationError, match=r"invalid target node names.*'nobody'"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert not is_set()
    # The same map is valid in a group that other workers may join.
    rpc.init_rpc("alone", rank=0, rpc_backend_options=_elsewhere(options, tmp_path))
    rpc.shutdown()


def _elsewhere(options: TensorPipeRpcBackendOptions, folder: Path) -> TensorPipeRpcBackendOptions:
    options.init_method = f"file://{folder / 'another'}"
    return options
