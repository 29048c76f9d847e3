from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

from tests.conformance.shims import profiling


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
