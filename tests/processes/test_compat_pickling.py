"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest

from tests.contract.processes import functions
from tests.contract.processes.test_compat_pickling import CALLS, Call, Sealed, opened, reduce_sealed
from torchweft import rpc
from torchweft.compat.rpc.internal import _internal_rpc_pickler
from torchweft.engine.codec import reducers
from torchweft.errors import SerializationError
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.mark.usefixtures("group")
def test_a_reducer_of_the_usual_pickler_holds_for_every_call(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducers, "_REDUCERS", dict(reducers._REDUCERS))
    monkeypatch.setattr(_internal_rpc_pickler, "_class_reducer_dict", {})
    with pytest.raises(SerializationError, match="sealed"):
        call("worker0", opened, (Sealed(4),))
    _internal_rpc_pickler._register_reducer(Sealed, reduce_sealed)
    assert call("worker0", opened, (Sealed(4),), {"plus": 1}) == 5
    assert call("worker0", opened, ([Sealed(4)][0],)) == 4


_noted: list[tuple[str, str]] = []


def note_failures(on: bool) -> list[tuple[str, str]]:
    """Starts or stops noting the errors of served calls; returns the notes."""
    worker = current_worker()
    worker.on_failure = (
        (lambda peer, error: _noted.append((peer.name, repr(error)))) if on else None
    )
    noted = list(_noted)
    _noted.clear()
    return noted


def fail(text: str) -> None:
    raise LookupError(text)


@pytest.mark.usefixtures("group")
def test_a_worker_can_be_told_of_the_calls_that_fail_there(call: Call) -> None:
    rpc.rpc_sync("worker0", note_failures, (True,))
    try:
        with pytest.raises(LookupError):
            call("worker0", fail, ("noted",))
        assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"
    finally:
        noted = rpc.rpc_sync("worker0", note_failures, (False,))
    # A value that could not be made fails once more for each worker that fetches it.
    assert set(noted) == {("driver", "LookupError('noted')")}
