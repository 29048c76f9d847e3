from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchweft.engine.wire.messages import NO_GRAD
from torchweft.errors import BatchError
from torchweft.rpc.stacking import (
    Entry,
    Options,
    Runner,
    kind_of,
    take_apart,
)


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(3),),
        (torch.ones(2, dtype=torch.float64),),
        (torch.ones(2, device="meta"),),
        (torch.ones(2), torch.ones(2)),
        [torch.ones(2)],
        (5,),
    ],
)
def test_calls_that_differ_are_not_alike(other: Any) -> None:
    one = take_apart((torch.ones(2),))
    assert kind_of(one, False) == kind_of(take_apart((torch.zeros(2),)), False)
    assert kind_of(one, False) != kind_of(take_apart(other), False)


# Runs


class Call:
    """A call of worker ``peer``, which keeps its outcome."""

    context_id, owned = NO_GRAD, None

    def __init__(self, name: str) -> None:
        self.peer = SimpleNamespace(name=name, is_self=False)


def run(runner: Runner, *calls: Any) -> list[Any]:
    """Runs calls of workers ``0``, ``1``, ...; returns their results, or their errors."""
    entries = [
        Entry(Call(str(place)), (), take_apart((each,)), 0.0)  # type: ignore[arg-type]
        for place, each in enumerate(calls)
    ]
    return [error or result for result, error in runner.outcomes(entries)]


@pytest.mark.parametrize("result", [torch.ones(3), torch.ones(()), (torch.ones(2), torch.ones(1))])
def test_a_result_without_a_row_for_each_call_is_refused(result: Any) -> None:
    for error in run(Runner(lambda _: result, "f", Options()), torch.ones(1), torch.ones(1)):
        assert isinstance(error, BatchError)
        assert "f was given a batch of 2 calls" in str(error)
        assert error.callers == ("0", "1")


def test_the_error_of_a_call_that_differs_names_caller_and_shapes() -> None:
    runner = Runner(lambda x: x, "f", Options())
    *_, error = run(runner, (torch.ones(2), 1), (torch.ones(2), 1), (torch.ones(3), 1))
    assert error.callers == ("2",)
    assert error.shapes == ("float32[3], 1 other",)
    assert "worker '2'" in str(error)
    assert "the others have float32[2], 1 other" in str(error)
