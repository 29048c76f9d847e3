from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from torchweft.compat.rpc.references import end_with
from torchweft.rpc import profiler_events


def test_names_of_functions() -> None:
    scripted = torch.jit.CompilationUnit("def same(x):\n    return x\n").same
    assert profiler_events.name_of(torch.add) == "aten::add"
    assert profiler_events.name_of(scripted).endswith("same")
    assert profiler_events.name_of(test_names_of_functions) == "test_names_of_functions"
    assert profiler_events.name_of(b"torchweft.rpc.serving:fetch") == "fetch"
    assert profiler_events.name_of("to_here") == "to_here"
    assert profiler_events.name_of(functools.partial(len)).startswith("functools.partial(")


def test_keys_name_the_call_and_its_ends() -> None:
    key = profiler_events.build_key(profiler_events.RPCExecMode.ASYNC, "f", "here", "there")
    assert key == "rpc_async#f(here -> there)"


@pytest.mark.parametrize("error", [None, ValueError("why")])
def test_an_event_ends_with_its_future(error: Exception | None) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    with profile() as events:
        with record_function("asking") as event:
            result = end_with(event, future)
        assert not result.done()
        if error is None:
            future.set_result(5)
            assert result.wait() == 5
        else:
            future.set_exception(error)
            with pytest.raises(ValueError, match="why"):
                result.wait()
    assert "asking" in [each.name for each in events.function_events]
