"""A gathering ends once, with the values or with an error."""

from __future__ import annotations

import pytest

from torchweft.errors import CallError, CallTimeout, WorkerLost
from torchweft.rpc.collective import Gathering, Ways, failure


def test_it_ends_with_the_values() -> None:
    gathering = Gathering(missing=(0, 1))
    assert not gathering.has_ended
    gathering.end({"a": 1})
    gathering.fail(CallTimeout("too late"))
    gathering.end({})
    assert gathering.has_ended
    assert gathering.values() == {"a": 1}


def test_it_fails_and_forgets_the_values() -> None:
    gathering = Gathering()
    gathering.gathered_objects["a"] = 1
    lost = WorkerLost("gone", worker="b")
    gathering.fail(lost)
    gathering.end({"a": 1})
    assert gathering.gathered_objects == {}
    with pytest.raises(WorkerLost, match="gone") as caught:
        gathering.values()
    assert caught.value is not lost  # or tracebacks of several raisers would mix
    assert caught.value.worker == "b"


def test_what_others_are_told_can_travel() -> None:
    def nothing(*_: object) -> None: ...

    class Local(Exception):
        """Cannot be rebuilt elsewhere."""

    error = failure(Local("why"), Ways("all_gather", nothing, nothing), "b")
    assert type(error) is CallError
    assert str(error) == "worker 'b' failed in all_gather: Local: why"
    assert (error.worker, error.call) == ("b", "all_gather")
