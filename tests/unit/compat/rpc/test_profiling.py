from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

from torchweft.compat.rpc import profiling


def test_names_of_functions() -> None:
    scripted = torch.jit.CompilationUnit("def same(x):\n    return x\n").same
    assert profiling.name_of(torch.add) == "aten::add"
    assert profiling.name_of(scripted).endswith("same")
    assert profiling.name_of(test_names_of_functions) == "test_names_of_functions"
    assert profiling.name_of(functools.partial(len)).startswith("functools.partial(")


def test_keys_name_the_call_and_its_ends() -> None:
    key = profiling.build_key(profiling.RPCExecMode.ASYNC, "f", "here", "there")
    assert key == "rpc_async#f(here -> there)"


@pytest.mark.parametrize("error", [None, ValueError("why")])
def test_an_event_ends_with_its_future(error: Exception | None) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    with profile() as events:
        assert profiling.is_enabled()
        with record_function("asking") as event:
            result = profiling.end_with(event, future)
        assert not result.done()
        if error is None:
            future.set_result(5)
            assert result.wait() == 5
        else:
            future.set_exception(error)
            with pytest.raises(ValueError, match="why"):
                result.wait()
    assert "asking" in [each.name for each in events.function_events]
    assert not profiling.is_enabled()
