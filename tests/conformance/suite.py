"""PyTorch's own tests of ``torch.distributed.rpc``, loaded so that they test Weft."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any


def _lenient_script(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.jit.script`` that leaves alone what it cannot compile."""
    if function is None:
        return functools.partial(_lenient_script, *args, **kwargs)
    try:
        return _script(function, *args, **kwargs)
    except Exception:
        return function


def load() -> dict[str, type]:
    """Returns PyTorch's test classes by suite and name, for instance ``tp.RpcTest``."""
    global _script
    os.environ["OMP_NUM_THREADS"] = "1"
    if os.environ.get("CONFORMANCE_SIDE", "weft") == "weft":
        import weft.compat

        weft.compat.install(in_children=False)
    import torch
    import torch.multiprocessing

    torch.set_num_threads(1)
    _script = torch.jit.script
    if os.environ.get("CONFORMANCE_SIDE", "weft") == "weft":
        torch.jit.script = _lenient_script
    try:
        from torch.testing._internal.distributed import rpc_utils
    finally:
        torch.jit.script = _script
    from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
        FaultyRpcAgentTestFixture,
    )
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    def fork_workers(case: Any) -> None:
        case._start_processes(torch.multiprocessing.get_context("fork").Process)

    rpc_utils.SpawnHelper._spawn_processes = fork_workers
    made = sys.modules.setdefault("conformance_classes", types.ModuleType("conformance_classes"))
    suites = (
        ("tp", TensorPipeRpcAgentTestFixture, rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS),
        ("faulty", FaultyRpcAgentTestFixture, rpc_utils.FAULTY_AGENT_TESTS),
    )
    classes: dict[str, type] = {}
    for suite, fixture, tests in suites:
        named = rpc_utils.generate_tests(suite, fixture, tests, made.__name__)
        for name, case in named.items():
            setattr(made, name, case)
            classes[f"{suite}.{name.removeprefix(suite)}"] = case
    return classes
