from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from torchweft.compat.rpc.references import end_with
from torchweft.rpc import calls


def test_names_of_functions() -> None:
    scripted = torch.jit.CompilationUnit("def same(x):\n    return x\n").same
    assert calls._event_name(torch.add) == "aten::add"
    assert calls._event_name(scripted).endswith("same")
    assert calls._event_name(test_names_of_functions) == "test_names_of_functions"
    assert calls._event_name(b"torchweft.rpc.serving:fetch") == "fetch"
    assert calls._event_name("to_here") == "to_here"
    assert calls._event_name(functools.partial(len)).startswith("functools.partial(")


def test_keys_name_the_call_and_its_ends() -> None:
    key = calls.build_key(calls.RPCExecMode.ASYNC, "f", "here", "there")
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
