from __future__ import annotations

import copy
import datetime
import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from tests.tables import cases
from torchweft import knobs, rpc
from torchweft.engine.protocol.registration import Devices
from torchweft.engine.worker.current import current, is_set
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc.options import (
    BackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    from_tensorpipe,
    warn_of_ignored,
)


def test_defaults_are_the_knobs_and_can_work() -> None:
    with knobs.WORKER_THREADS.override(3), knobs.RPC_TIMEOUT_S.override(7.5):
        options = RpcBackendOptions()
    assert options.num_worker_threads == 3
    assert options.rpc_timeout == options.default_timeout_s == 7.5
    options.check()


def test_zero_means_no_time_limit() -> None:
    options = RpcBackendOptions(rpc_timeout=0)
    options.check()
    assert options.default_timeout_s == math.inf


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


def test_allowed_modules_can_be_given_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_ALLOWED_MODULES", raising=False)
    assert RpcBackendOptions().allowed_modules is None
    monkeypatch.setenv("WEFT_ALLOWED_MODULES", "my_package, torch ,")
    assert RpcBackendOptions().allowed_modules == ("my_package", "torch")
    assert RpcBackendOptions(allowed_modules=()).allowed_modules == ()
    RpcBackendOptions(allowed_modules=("my_package.part", "torchweft.checkpoint")).check()
    RpcBackendOptions(allowed_modules=("torchweft.rl", "torchweft.weights")).check()
    with pytest.raises(ConfigurationError, match="WEFT_ALLOWED_MODULES"):
        RpcBackendOptions(strict=True).check()
    RpcBackendOptions(strict=True, allowed_modules=None, callables=(math.sqrt,)).check()


CUDA = [torch.device("cuda", index) for index in range(3)]


def test_defaults() -> None:
    made = TensorPipeRpcBackendOptions()
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (16, 60.0, "env://")
    assert (made.device_maps, made.devices) == ({}, [])
    assert isinstance(made, BackendOptions)


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


def test_arguments_go_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        TensorPipeRpcBackendOptions(16)  # type: ignore[misc]


def test_a_class_of_a_program_need_not_call_super() -> None:
    class Options(BackendOptions):
        def __init__(self, init_method: str) -> None:
            BackendOptions.__init__(self)
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


@pytest.mark.parametrize("device_map", [{-1: 0}, {0: -1}])
def test_an_index_that_is_negative(
    monkeypatch: pytest.MonkeyPatch, device_map: dict[Any, Any]
) -> None:
    def device(given: Any) -> torch.device:
        # As torch where there is a GPU: an index alone means one.
        if type(given) is int and given < 0:
            raise RuntimeError("Device index must not be negative")
        return made(f"cuda:{given}" if type(given) is int else given)

    made = torch.device
    monkeypatch.setattr(torch, "device", device)
    with pytest.raises(RuntimeError, match="Device index must not be negative") as caught:
        TensorPipeRpcBackendOptions().set_device_map("a", device_map)
    assert isinstance(caught.value, ConfigurationError)


MAPS: Any = {"a": {"cuda:0": CUDA[1], torch.device("cpu"): "cuda:2"}, "b": {"cpu": "cpu:0"}}


def test_device_settings_are_texts_and_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    names = {"a": {"cuda:0": "cuda:1", "cpu": "cuda:2"}, "b": {"cpu": "cpu"}}
    options = RpcBackendOptions(device_maps=MAPS, devices=[CUDA[2], "cuda:0"])
    options.check()
    assert options.device_settings() == Devices(names, ("cuda:2", "cuda:0"), 3)
    pytorchs = TensorPipeRpcBackendOptions(device_maps=MAPS, devices=["cuda:2", "cuda:0"])
    assert from_tensorpipe(pytorchs).device_settings() == options.device_settings()
    assert RpcBackendOptions().device_settings() == Devices()
    # The group is asked about this one, so that all its workers fail in the same way.
    many_to_one = TensorPipeRpcBackendOptions(device_maps={"a": {"cuda:1": "cuda:0"}})
    many_to_one.set_device_map("a", {"cuda:0": "cuda:0"})
    names = {"a": {"cuda:1": "cuda:0", "cuda:0": "cuda:0"}}
    assert from_tensorpipe(many_to_one).device_settings() == Devices(names, (), 3)


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


# Options without effect


def test_what_has_no_effect_is_said() -> None:
    made = TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored(made, stacklevel=1)
    (warning,) = caught
    assert warning.category is UserWarning
    for name in ("_transports", "_channels"):
        assert name in str(warning.message)


@pytest.mark.parametrize(
    "made",
    [
        TensorPipeRpcBackendOptions(),
        TensorPipeRpcBackendOptions(_transports=None, _channels=None, devices=None),
        TensorPipeRpcBackendOptions(num_worker_threads=2, rpc_timeout=3),
        TensorPipeRpcBackendOptions(device_maps={"a": {"cuda:0": "cuda:1"}}, devices=["cuda:0"]),
    ],
    ids=["defaults", "none", "others", "devices"],
)
def test_what_has_an_effect_is_not_said(made: TensorPipeRpcBackendOptions) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ignored(made, stacklevel=1)
    assert not caught


def test_the_warning_names_the_line_that_joins() -> None:
    def joining() -> None:
        warn_of_ignored(TensorPipeRpcBackendOptions(_channels=["basic"]), stacklevel=2)

    with pytest.warns(UserWarning, match="no effect in Weft") as caught:
        joining()
    line = inspect.getsourcelines(test_the_warning_names_the_line_that_joins)[1] + 5
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


# Options in a group


def test_pytorchs_options_are_taken_by_init_rpc(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3,
        rpc_timeout=7.5,
        init_method=f"file://{tmp_path / 'store'}",
        device_maps={"alone": {"cpu": "cpu"}},
    )
    rpc.init_rpc(
        "alone",
        backend=rpc.BackendType.TENSORPIPE,
        rank=0,
        world_size=1,
        rpc_backend_options=options,
    )
    try:
        assert rpc.get_rpc_timeout() == 7.5
        assert current().reactor.limit == 3
    finally:
        rpc.shutdown()


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


def test_the_default_method_leaves_the_choice_to_the_launcher() -> None:
    assert from_tensorpipe(TensorPipeRpcBackendOptions()).init_method is None
    given = TensorPipeRpcBackendOptions(init_method="tcp://localhost:1", rpc_timeout=0)
    assert from_tensorpipe(given).init_method == "tcp://localhost:1"
    assert from_tensorpipe(given).default_timeout_s == math.inf
    store = HashStore()
    assert from_tensorpipe(given, store=store).init_method is None
