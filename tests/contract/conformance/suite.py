"""PyTorch's own tests of ``torch.distributed.rpc``, loaded so that they test Weft.

The tests come with the torch wheel. Three things are changed in them. The modules under test are
Weft's (``torchweft.compat``, and the additions of ``shims``). Their workers are forked from this
process instead of started anew, which takes 0.3 s instead of 14. Functions that
``torch.jit.script`` cannot compile stay Python functions while the modules are imported, because
the modules compile programs that call RPC functions during their import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
import unittest
from typing import Any

from tests.contract.conformance.cases import CaseName

SIDE = os.environ.get("CONFORMANCE_SIDE", "weft")
"""``torch`` runs the tests on PyTorch's own implementation, to compare."""

_INTERNAL = "torch.testing._internal"
_FIXTURES = {
    "TensorPipe": (
        f"{_INTERNAL}.distributed.rpc.tensorpipe_rpc_agent_test_fixture",
        "TensorPipeRpcAgentTestFixture",
    ),
    "Faulty": (
        f"{_INTERNAL}.distributed.rpc.faulty_rpc_agent_test_fixture",
        "FaultyRpcAgentTestFixture",
    ),
}
_SUITES = {
    "tp": ("TensorPipe", ("GENERIC_TESTS", "TENSORPIPE_TESTS")),
    "faulty": ("Faulty", ("FAULTY_AGENT_TESTS",)),
    "cuda": ("TensorPipe", ("GENERIC_CUDA_TESTS", "TENSORPIPE_CUDA_TESTS")),
}
"""Each suite's fixture, and the lists of classes in PyTorch's ``rpc_utils`` that it runs with."""


class NotInstalled(Exception):
    """A package that PyTorch's test modules import is missing."""


def load(limit_s: float = 60.0) -> dict[str, type[unittest.TestCase]]:
    """Returns PyTorch's test classes by suite and name, for instance ``tp.RpcTest``.

    Args:
        limit_s: After how long a test gives up its workers, and writes where they were.

    Raises:
        NotInstalled: A package that the test modules import is missing.
    """
    if importlib.util.find_spec("expecttest") is None:
        raise NotInstalled(
            "PyTorch's test modules import expecttest, which is not installed: "
            "`make conformance` and `make test` install it, or `pip install expecttest` (8 kB)"
        )
    _prepare_environment()
    if SIDE == "weft":
        from tests.conformance import shims

        shims.install()
    rpc_utils = _import_test_modules()
    _fork_workers(rpc_utils, limit_s)
    return _make_classes(rpc_utils)


def gpu_count() -> int:
    """Returns the number of GPUs, without a step that keeps forked processes from using them."""
    import torch

    return torch.cuda.device_count()


def can_use_gpu_in_children() -> bool:
    """Returns whether forked processes can use a GPU: not if this one has initialised CUDA."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def catalogue(classes: dict[str, type[unittest.TestCase]]) -> list[CaseName]:
    """Returns all tests of ``classes``."""
    names = unittest.TestLoader().getTestCaseNames
    return [
        CaseName.parse(f"{name}.{test}") for name, case in classes.items() for test in names(case)
    ]


def _prepare_environment() -> None:
    """Sets what must be set before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # Counting the GPUs in the usual way leaves forked processes unable to use one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Some tests call workers that may still be in init_process_group, and rely on slow calls.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"


def _import_test_modules() -> Any:
    import torch

    script = torch.jit.script
    if SIDE == "weft":
        torch.jit.script = functools.partial(_script_if_possible, script)
    try:
        modules = importlib.import_module(f"{_INTERNAL}.distributed.rpc_utils")
    finally:
        torch.jit.script = script
    # Each test asks this module, as it begins, for suffixes of tests' names. To import it would
    # initialise CUDA, so that the workers of the test, which are forked afterwards, could not.
    stub: Any = types.ModuleType(f"{_INTERNAL}.common_device_type")
    stub.get_device_type_test_bases = list
    sys.modules.setdefault(stub.__name__, stub)
    return modules


def _script_if_possible(script: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Does what ``torch.jit.script`` does, but returns what it cannot compile unchanged."""
    if function is None:  # with arguments, as a decorator
        return functools.partial(_script_if_possible, script, *args, **kwargs)
    try:
        return script(function, *args, **kwargs)
    except Exception:
        return function


def _fork_workers(rpc_utils: Any, limit_s: float) -> None:
    """Makes each test fork its workers, which use one thread for computing each.

    The number is set in the worker and not before the fork: a thread pool of the parent does not
    exist in the child. If several threads of the child are the first to use torch, all would notice
    that at the same time ("Invalid thread pool").
    """
    import torch
    import torch.multiprocessing

    common = importlib.import_module(f"{_INTERNAL}.common_distributed")
    common.TIMEOUT_DEFAULT = limit_s
    case_class = common.MultiProcessTestCase
    run = case_class._run.__func__

    def run_with_one_thread(cls: Any, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        run(cls, *args, **kwargs)

    def start_processes(case: Any) -> None:
        case._start_processes(torch.multiprocessing.get_context("fork").Process)

    case_class._run = classmethod(run_with_one_thread)
    rpc_utils.SpawnHelper._spawn_processes = start_processes


def _make_classes(rpc_utils: Any) -> dict[str, type[unittest.TestCase]]:
    """Mixes the fixtures into the classes, as PyTorch's own test programs do."""
    made = sys.modules.setdefault("conformance_classes", types.ModuleType("conformance_classes"))
    classes: dict[str, type[unittest.TestCase]] = {}
    for suite, (fixture_name, lists) in _SUITES.items():
        module, name = _FIXTURES[fixture_name]
        fixture = getattr(importlib.import_module(module), name)
        tests = [test for listed in lists for test in getattr(rpc_utils, listed, ())]
        for made_name, case in rpc_utils.generate_tests(
            suite, fixture, tests, made.__name__
        ).items():
            setattr(made, made_name, case)
            classes[f"{suite}.{made_name.removeprefix(suite)}"] = case
    return classes
