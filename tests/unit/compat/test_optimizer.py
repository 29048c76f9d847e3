"""Tests the names of ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

import pytest
import torch

from torchweft.compat import optimizer


def future(result: int = 0, error: Exception | None = None) -> torch.futures.Future[int]:
    made: torch.futures.Future[int] = torch.futures.Future()
    if error is None:
        made.set_result(result)
    else:
        made.set_exception(error)
    return made


def test_all_are_waited_for_and_the_last_failure_is_raised() -> None:
    assert optimizer._wait_for_all([future(1), future(2)]) == [1, 2]
    with pytest.raises(ValueError, match="second"):
        optimizer._wait_for_all(
            [future(error=KeyError("first")), future(error=ValueError("second"))]
        )
