from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from torchweft.compat.rpc.references import end_with


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
