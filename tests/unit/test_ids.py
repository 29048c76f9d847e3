from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from torchweft.errors import ConfigurationError
from torchweft.ids import WORKER_SHIFT, ReferenceId, WorkerInfo, scoped_id, worker_of

WORKERS = st.integers(min_value=0, max_value=(1 << 15) - 1)
COUNTERS = st.integers(min_value=0, max_value=(1 << WORKER_SHIFT) - 1)


@given(WORKERS, COUNTERS)
def test_scoped_id_tells_its_worker_and_fits_a_signed_64_bit_field(
    worker: int, counter: int
) -> None:
    scoped = scoped_id(worker, counter)
    assert worker_of(scoped) == worker
    assert 0 <= scoped < 1 << 63


@given(st.tuples(WORKERS, COUNTERS), st.tuples(WORKERS, COUNTERS))
def test_scoped_ids_of_different_workers_or_counters_differ(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    assert (scoped_id(*first) == scoped_id(*second)) == (first == second)


def test_worker_info_is_a_value() -> None:
    info = WorkerInfo("trainer", 3)
    assert pickle.loads(pickle.dumps(info)) == info
    assert {info: "found"}[WorkerInfo("trainer", 3)] == "found"
    assert info != WorkerInfo("trainer", 4)


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


def test_reference_ids_of_one_number_differ_by_creator_and_owner() -> None:
    ids = {ReferenceId(creator, owner, 0) for creator in range(3) for owner in range(3)}
    assert len(ids) == 9
