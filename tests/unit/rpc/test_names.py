"""The names that a program uses if it changes only its imports."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import torchweft
from tests.tables import cases
from torchweft import rpc

STOCK = "torch.distributed"

REGISTRY = {
    "AllGatherStates",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
}
"""Names that are public in PyTorch but concern its internals or its registry of back-ends."""

LEFT_BEHIND = {"method_factory", "new_method"}  # by a loop


def stock(module: str) -> Any:
    return importlib.import_module(f"{STOCK}.{module}")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_public_name_of_rpc_is_there_or_explained() -> None:
    names = set(stock("rpc").__all__) - LEFT_BEHIND
    assert names - set(dir(rpc)) == REGISTRY
    for name in REGISTRY:
        with pytest.raises(AttributeError, match=r"torchweft\.compat"):
            getattr(rpc, name)


def test_what_programs_use_besides_is_there() -> None:
    used = "BackendType.TENSORPIPE PyRRef WorkerInfo constants functions get_rpc_timeout options"
    for path in used.split():
        value: Any = rpc
        for part in path.split("."):
            value = getattr(value, part)
    assert issubclass(rpc.PyRRef, rpc.RRef)
    assert rpc.options.TensorPipeRpcBackendOptions is rpc.TensorPipeRpcBackendOptions
    assert repr(rpc.BackendType.TENSORPIPE) == repr(stock("rpc").BackendType.TENSORPIPE)


@pytest.mark.parametrize("module", ["rpc.constants", "rpc.functions"])
def test_modules_below_have_the_same_names(module: str) -> None:
    ours = importlib.import_module(f"torchweft.{module}")
    theirs = [
        name
        for name, value in vars(stock(module)).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (not inspect.isclass(value) or value.__module__ == f"{STOCK}.{module}")
        and getattr(value, "__module__", None) not in ("functools", "collections.abc", "typing")
    ]
    assert theirs
    assert [name for name in theirs if not hasattr(ours, name)] == []


@cases(
    "path",
    """
    rpc.init_rpc rpc.shutdown rpc.rpc_sync rpc.rpc_async rpc.remote rpc.get_worker_info
    rpc.is_available rpc.TensorPipeRpcBackendOptions
    rpc.TensorPipeRpcBackendOptions.set_device_map rpc.TensorPipeRpcBackendOptions.set_devices
    autograd.is_available
    """.split(),
)
def test_parameters_have_the_same_names_and_order(path: str) -> None:
    ours: Any = torchweft
    theirs: Any = importlib.import_module(STOCK)
    for part in path.split("."):
        ours = getattr(ours, part)
        theirs = stock(part) if theirs.__name__ == STOCK else getattr(theirs, part)
    expected = parameters(theirs)
    assert parameters(ours)[: len(expected)] == expected


def test_an_unknown_name_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(AttributeError, match="did you mean 'rpc_async'"):
        rpc.rpc_asinc  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'xylophone'$"):
        rpc.xylophone  # noqa: B018
    with pytest.raises(AttributeError, match=r"use torchweft\.rpc\.functions\.batched$"):
        rpc.batched  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'all_gather'"):
        rpc._all_gather  # type: ignore[attr-defined]  # noqa: B018
