from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.tables import cases
from torchweft import errors
from torchweft.engine.codec.exceptions import fresh_copy, pack_error, unpack_error
from torchweft.errors import WeftError

ALL_ERRORS = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, WeftError)
]

BUILT_IN = {
    "ConfigurationError": (ValueError, RuntimeError),
    "NotSupported": (NotImplementedError,),
    "ArgumentTypeError": (ValueError, TypeError),
    "RendezvousTimeout": (RuntimeError, TimeoutError),
    "UnknownWorker": (RuntimeError, ValueError),
    "CallTimeout": (RuntimeError, TimeoutError),
    "SerializationError": (RuntimeError, TypeError),
    "UnknownFunction": (RuntimeError, AttributeError),
    "MethodNotFound": (RuntimeError, AttributeError),
    "WorkerLost": (RuntimeError, ConnectionError),
    "OwnerLost": (RuntimeError, ConnectionError),
    "SnapshotNotFound": (RuntimeError, FileNotFoundError),
    "StateMismatch": (RuntimeError, ValueError),
}

WITH_FIELDS = [
    errors.RendezvousTimeout("two are missing", missing=(1, 3), elapsed_s=2.5),
    errors.CallError("failed", worker="ps", call="module.f", elapsed_s=0.5),
    errors.CallTimeout("no answer", worker="ps", call="module.f", elapsed_s=60.0),
    errors.NotAllowed("no", worker="ps", refused="os:system"),
    errors.RemoteError("boom", type_name="module.Boom", worker="ps"),
    errors.WorkerLost("ps is gone", worker="ps", since=1e9, cause="end of file"),
    errors.OwnerLost("ps is gone", worker="ps", since=1e9, cause="end of file"),
    errors.AutogradError("backward failed", worker="ps", operation="MulBackward0"),
    errors.BackwardTimeout("late", worker="ps", operation="waiting", missing=("ps",)),
    errors.BackwardLost("gone", worker="ps", since=1e9, cause="end of file", operation="its part"),
    errors.OptimizerError("step failed", worker="ps", others=("trainer0",)),
    errors.ReduceError("shapes differ", reducer="mean_reducer", results=3),
    errors.CheckpointError("disk full", directory="/runs", step=3, worker="ps"),
    errors.SnapshotCorrupt("a bit flipped", step=3, file="1-ps.pt", alternatives=(2, 1)),
    errors.StateMismatch("other", missing=("a",), unexpected=("b",), differing=("c: shape",)),
    errors.LaunchError("worker 2 died", worker="ps", exit_code=-9),
]


def test_error_is_caught_as_the_built_in_that_torch_rpc_users_catch() -> None:
    for error_type in ALL_ERRORS:
        if error_type is not WeftError:
            for built_in in BUILT_IN.get(error_type.__name__, (RuntimeError,)):
                assert issubclass(error_type, built_in)


def declared(error_type: type[WeftError]) -> dict[str, object]:
    """Returns a value other than the default for each field."""
    defaults: dict[str, object] = {
        field.name: field.default for field in dataclasses.fields(error_type)
    }
    others = {str: "other", float: 0.5, int: 7, type(None): 7, tuple: ("a", "b")}
    return {name: others[type(default)] for name, default in defaults.items()}


def through_pickle(error: WeftError) -> Any:
    return pickle.loads(pickle.dumps(error))


def through_a_record(error: WeftError) -> Any:
    return unpack_error(pack_error(error, "ps"))


def through_a_plain_record(error: WeftError) -> Any:
    return unpack_error(pack_error(error, "ps", is_plain=True))


KEEP_THE_CAUSE = (copy.copy, fresh_copy, through_a_record, through_a_plain_record)


@pytest.mark.parametrize("trip", [through_pickle, copy.deepcopy, *KEEP_THE_CAUSE])
def test_a_round_trip_keeps_an_error(trip: Callable[[WeftError], Any]) -> None:
    for error_type in ALL_ERRORS:
        check_round_trip(error_type, trip)


def check_round_trip(error_type: type[WeftError], trip: Callable[[WeftError], Any]) -> None:
    error = error_type("what happened", **declared(error_type))
    error.__notes__ = ["a note"]  # type: ignore[attr-defined]  # add_note came with Python 3.11
    error.extra = 3  # type: ignore[attr-defined]
    error.__cause__ = KeyError("missing")
    expected = {**declared(error_type), "extra": 3}
    arrived = trip(error)
    assert arrived is not error
    assert type(arrived) is error_type
    assert (arrived.args, str(arrived)) == (("what happened",), "what happened")
    assert repr(arrived) == f"{error_type.__name__}('what happened')"
    assert arrived.__notes__[0] == "a note"
    assert arrived.__notes__ is not error.__notes__  # type: ignore[attr-defined]
    assert {name: value for name, value in vars(arrived).items() if name != "__notes__"} == expected
    if trip in KEEP_THE_CAUSE:
        assert repr(arrived.__cause__) == "KeyError('missing')"
        assert arrived.__suppress_context__


@cases("error", WITH_FIELDS)
def test_a_pickle_of_an_error_has_the_form_that_other_versions_read(error: WeftError) -> None:
    fields = {field.name: getattr(error, field.name) for field in dataclasses.fields(error)}
    made = errors._rebuild_with_fields(type(error), str(error), fields)
    assert vars(made) == vars(error)
    assert error.__reduce__() == (
        errors._rebuild_with_fields,
        (type(error), str(error), fields),
    )
