from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from torchweft.errors import ConfigurationError
from torchweft.ids import WORKER_SHIFT, WorkerInfo, scoped_id, worker_of

WORKERS = st.integers(min_value=0, max_value=(1 << 15) - 1)
COUNTERS = st.integers(min_value=0, max_value=(1 << WORKER_SHIFT) - 1)


@given(WORKERS, COUNTERS)
def test_scoped_id_tells_its_worker_and_fits_a_signed_64_bit_field(
    worker: int, counter: int
) -> None:
    scoped = scoped_id(worker, counter)
    assert worker_of(scoped) == worker
    assert 0 <= scoped < 1 << 63


@pytest.mark.parametrize("name", ["a", "Trainer_0:cpu-1", "-", "a" * 127])
def test_names_of_workers(name: str) -> None:
    assert WorkerInfo(name, 0).name == name


@cases("name", ["", " ", "abc*", "a\n", "a.b", "é", "a" * 128, None, 5, b"a"])
def test_what_is_no_name_of_a_worker(name: Any) -> None:
    pattern = r"must match \[A-Za-z0-9_:-\]\*, must be non-empty and shorter than 128 characters"
    with pytest.raises(ConfigurationError, match=pattern) as caught:
        WorkerInfo(name, 0)
    assert str(caught.value).startswith(f"{name!r} is no name for a worker")
    assert isinstance(caught.value, RuntimeError)
