from __future__ import annotations

import inspect
import pickle
import re

import pytest

from torchweft import errors
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
    errors.OptimizerError("step failed", worker="ps", others=("trainer0",)),
    errors.ReduceError("shapes differ", reducer="mean_reducer", results=3),
    errors.CheckpointError("disk full", directory="/runs", step=3, worker="ps"),
    errors.SnapshotCorrupt("a bit flipped", step=3, file="1-ps.pt", alternatives=(2, 1)),
    errors.StateMismatch("other", missing=("a",), unexpected=("b",), differing=("c: shape",)),
    errors.LaunchError("worker 2 died", worker="ps", exit_code=-9),
]


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_error_is_caught_as_the_built_in_that_torch_rpc_users_catch(
    error_type: type[WeftError],
) -> None:
    if error_type is not WeftError:
        assert issubclass(error_type, BUILT_IN.get(error_type.__name__, (RuntimeError,)))
        for built_in in BUILT_IN.get(error_type.__name__, ()):
            assert issubclass(error_type, built_in)


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_error_survives_pickling_with_type_and_text(error_type: type[WeftError]) -> None:
    copy = pickle.loads(pickle.dumps(error_type("what happened")))
    assert type(copy) is error_type
    assert str(copy) == "what happened"


@pytest.mark.parametrize("error", WITH_FIELDS, ids=lambda error: type(error).__name__)
def test_fields_survive_pickling(error: WeftError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"(?:├──|└──) (\w+)", errors.__doc__))
    assert drawn == {error_type.__name__ for error_type in ALL_ERRORS} - {"WeftError"}
