"""Tests that Weft's modules have all names of PyTorch's, but for those left out for a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import torchweft.compat
from tests.tables import cases
from torchweft.compat import rpc
from torchweft.compat.rpc.backend_registry import register_backend
from torchweft.errors import NotSupported

STOCK = "torch.distributed.rpc"

_IMPORTED = "imported from another module of PyTorch's, where it is to be found"
_LOOP = "left behind by a loop or a type annotation"
_PICKLING = "a step of how PyTorch's calls are turned into those of its C++ agent"
_DEVICES = "a step of how PyTorch's agents agree on device maps; see options.check_device_maps"
_MEMBERSHIP = "a step of how PyTorch's agents keep an open group; Weft's do by themselves"
_PROFILER = "the profiler of all calls that a process serves; there is none"
_TESTS = "only PyTorch's own tests use it; tests/conformance/shims has it"

LEFT_OUT_MODULES = {
    "_testing": _TESTS,
    "_utils": _MEMBERSHIP,
    "server_process_global_profiler": _PROFILER,
}
"""PyTorch's modules without a counterpart in Weft, with the reason."""

LEFT_OUT: dict[str, dict[str, str]] = {
    "": {
        "_TensorPipeRpcBackendOptionsBase": "the part in C++ of TensorPipeRpcBackendOptions",
        "_init_counter": "numbers the groups of the process; nobody else may count",
        "method_factory": _LOOP,
        "new_method": _LOOP,
        **LEFT_OUT_MODULES,
    },
    "api": {
        "TensorPipeAgent": _IMPORTED,
        **dict.fromkeys(["PythonUDF", "RPCExecMode", "_build_rpc_profiling_key"], _IMPORTED),
        **dict.fromkeys(["RemoteProfilerManager", "_cleanup_python_rpc_handler"], _IMPORTED),
        **dict.fromkeys(["_destroy_rref_context", "_group_membership_management"], _IMPORTED),
        **dict.fromkeys(["_update_group_membership", "_invoke_remote_builtin"], _IMPORTED),
        **dict.fromkeys(["_invoke_remote_python_udf", "_invoke_remote_torchscript"], _IMPORTED),
        **dict.fromkeys(["_invoke_rpc_builtin", "_invoke_rpc_python_udf"], _IMPORTED),
        "_invoke_rpc_torchscript": _IMPORTED,
        **dict.fromkeys(["T", "_P", "_R", "TYPE_CHECKING", "GenericWithOneTypeVar"], _LOOP),
        **dict.fromkeys(["docstring", "method", "method_name"], _LOOP),
        **dict.fromkeys(["method_factory", "new_method"], _LOOP),
        **dict.fromkeys(["_invoke_rpc", "_to_worker_info"], _PICKLING),
        **dict.fromkeys(["_get_should_profile", "_enable_rpc_profiler"], _PICKLING),
        **dict.fromkeys(["_rref_typeof_on_owner", "_rref_typeof_on_user"], _PICKLING),
        "_ALL_WORKER_NAMES": "who is in the group is asked of the agent",
        "_all_gather_sequence_id": "the state of a gathering is that of the object that does it",
        "_all_gather_sequence_id_to_states": "the same",
    },
    "backend_registry": {
        "_backend_type_doc": "is in the function that makes the enumeration",
        "_backend_type_repr": "is a method of the enumeration",
        "_create_device_list": _DEVICES,
        "_create_reverse_mapping": _DEVICES,
        "_get_device_infos": _DEVICES,
        "_set_devices_and_reverse_device_map": _DEVICES,
        "_tensorpipe_exchange_and_check_all_device_maps": _DEVICES,
        "_tensorpipe_validate_devices": _DEVICES,
        "_validate_device_maps": _DEVICES,
        "_group_membership_management": _IMPORTED,
        "_update_group_membership": _IMPORTED,
        "_init_process_group": "Weft has no process group underneath",
        "_tensorpipe_construct_rpc_backend_options_handler": "BackendType.TENSORPIPE.value has it",
        "_tensorpipe_init_backend_handler": "BackendType.TENSORPIPE.value has it",
        "api": _IMPORTED,
        "rpc_constants": _IMPORTED,
    },
    "internal": {
        "_get_current_rpc_agent": _IMPORTED,
        **dict.fromkeys(["RemoteException", "_handle_exception", "_run_function"], _PICKLING),
        **dict.fromkeys(["RPCExecMode", "_build_rpc_profiling_key"], _TESTS),
        "_start_record_function": _PROFILER,
    },
    "options": {
        "_TensorPipeRpcBackendOptionsBase": "the part in C++ of TensorPipeRpcBackendOptions",
        "_is_tensorpipe_available": _IMPORTED,
        "rpc_contants": _IMPORTED,
    },
    "rref_proxy": {
        **dict.fromkeys(["_local_invoke", "_local_invoke_async_execution"], _PICKLING),
        **dict.fromkeys(["_invoke_rpc", "functions", "rpc_async"], _IMPORTED),
    },
}
"""By module: the names that only PyTorch's module has, with the reason."""

MODULES = [
    "",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "internal",
    "options",
    "rref_proxy",
]


def both(name: str) -> tuple[ModuleType, ModuleType]:
    torchweft.compat.uninstall()
    stock = importlib.import_module(f"{STOCK}.{name}" if name else STOCK)
    ours = importlib.import_module(
        f"torchweft.compat.rpc.{name}" if name else "torchweft.compat.rpc"
    )
    assert stock is not ours
    return stock, ours


def own_names(module: ModuleType) -> Iterator[str]:
    """Yields the names of a PyTorch module, without its imports from other packages."""
    for name, value in vars(module).items():
        home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        is_foreign = isinstance(home, str) and not home.startswith((STOCK, "torch._C"))
        if not is_foreign and not (name.startswith("__") and name.endswith("__")):
            yield name


def test_every_module_is_there_or_left_out_for_a_reason() -> None:
    stock, ours = both("")
    theirs = {module.name for module in pkgutil.iter_modules(stock.__path__)}
    assert theirs == set(filter(None, MODULES)) | set(LEFT_OUT_MODULES)
    assert not set(LEFT_OUT_MODULES) & {
        module.name for module in pkgutil.iter_modules(ours.__path__)
    }


@cases("name", MODULES)
def test_every_name_is_there_or_left_out_for_a_reason(name: str) -> None:
    stock, ours = both(name)
    missing = {each for each in own_names(stock) if not hasattr(ours, each)}
    assert missing <= set(LEFT_OUT.get(name, {}))


@pytest.mark.parametrize("name", ["", "backend_registry", "internal", "options"])
def test_what_is_left_out_is_not_there(name: str) -> None:
    _, ours = both(name)
    assert not [each for each in LEFT_OUT[name] if hasattr(ours, each)]


def test_star_imports_bring_what_pytorchs_do() -> None:
    stock, ours = both("")
    # Only a test of PyTorch's imports these two names from there.
    assert set(stock.__all__) <= set(ours.__all__) | {"method_factory", "new_method"}
    assert all(hasattr(ours, name) for name in ours.__all__)


def test_constants_have_the_same_values() -> None:
    stock, ours = both("constants")
    for name in own_names(stock):
        assert getattr(ours, name) == getattr(stock, name), name


def test_dir_lists_what_is_looked_up_elsewhere() -> None:
    assert {"BackendType", "rendezvous_iterator", "init_rpc"} <= set(dir(rpc))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rpc.no_such_name


def test_the_enumeration_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweft.compat.rpc import backend_registry

    monkeypatch.setattr(backend_registry, "BackendType", rpc.BackendType)
    register_backend("NEWEST", dict, dict)
    assert rpc.BackendType is backend_registry.BackendType
    assert rpc.BackendType.NEWEST.name == "NEWEST"


@cases("name", rpc._ABSENT)
def test_what_has_no_meaning_says_so_when_it_is_called(name: str) -> None:
    function: Any = getattr(rpc, name)
    with pytest.raises(NotSupported, match=f"Weft has no {name}: ") as caught:
        function(1, 2, key=3)
    assert isinstance(caught.value, RuntimeError)


def test_profilers_of_other_workers_say_so_when_they_are_made() -> None:
    with pytest.raises(NotSupported, match="a profiler that runs there"):
        rpc._server_process_global_profile(enabled=True)
    with pytest.raises(NotSupported, match="a profiler that runs there"):
        rpc.RemoteProfilerManager.set_current_profiling_key("key")


def test_there_are_no_objects_of_a_c_agent_to_free() -> None:
    rpc._cleanup_python_rpc_handler()
