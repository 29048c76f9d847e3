from __future__ import annotations

import pickle

import pytest

from torchweft.errors import ConfigurationError, WeftError
from torchweft.pipeline.schedules import CellError, ScheduleError, TableError

ERRORS = [
    ScheduleError("no", schedule="ScheduleGPipe", n_workers=2, n_stages=2, n_microbatches=0),
    TableError("no", worker=1, position=4, action="1F3", waits_for="0F3"),
    CellError("no", row=1, column=2, cell="0X0"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_fields_survive_pickling(error: WeftError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == "no"
    assert vars(arrived) == vars(error)
    assert isinstance(arrived, ConfigurationError)
