"""Tests the single error that is raised for the errors of several workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchweft.engine.worker import current
from torchweft.errors import CallTimeout, OptimizerError, WorkerLost
from torchweft.optim.distributed import Failure, raise_failures


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("driver", "ps0", "ps1")
    peers = {rank: SimpleNamespace(name=name) for rank, name in enumerate(names)}
    monkeypatch.setattr(current, "here", SimpleNamespace(peers=peers))


def test_the_first_error_is_the_cause_and_all_are_in_the_text() -> None:
    first = ValueError("too big")
    with pytest.raises(OptimizerError) as caught:
        raise_failures("the step", [Failure(1, first), Failure(2, KeyError("lr"))])
    assert str(caught.value) == (
        "the step failed on worker 'ps0': ValueError: too big; and on worker 'ps1': KeyError: 'lr'"
    )
    assert caught.value.__cause__ is first
    assert (caught.value.worker, caught.value.others) == ("ps0", ("ps1",))


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("ps1 is gone", worker="ps1", since=7.0, cause="end of file"),
        CallTimeout("no answer", worker="ps1", call="step", elapsed_s=3.0),
    ],
)
def test_what_calls_for_a_recovery_keeps_its_type_and_fields(
    error: WorkerLost | CallTimeout,
) -> None:
    with pytest.raises(type(error), match=r"on worker 'ps1'.*on worker 'driver'") as caught:
        raise_failures("the step", [Failure(0, ValueError("x")), Failure(2, error)])
    assert vars(caught.value) == vars(error)
