from __future__ import annotations

import math
from typing import Any

import pytest
from torch.distributed import HashStore

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.rpc.options import RpcBackendOptions


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


@pytest.mark.parametrize(
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
        ({"strict": True, "callables": "math"}, "callables is a str"),
        ({"strict": True, "callables": 3}, "callables is a int"),
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
    with pytest.raises(ConfigurationError, match="WEFT_ALLOWED_MODULES"):
        RpcBackendOptions(strict=True).check()
    RpcBackendOptions(strict=True, allowed_modules=None, callables=(math.sqrt,)).check()
