"""What every test gets: one compute thread, and a check that it leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

# Before torch is imported anywhere: the machine's cores are for the workers of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.leaks import KINDS, find_leaks, take_state

# Time is never what a property is about, and a shared machine has slow moments.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")


def pytest_collection_finish() -> None:
    """Takes what the imports have made out of the way of every single test.

    That is a third of a million objects for the garbage collector, and torch's fifty loggers that
    do not propagate: pytest adds its handler to each such logger, three times a test.
    """
    gc.freeze()
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Takes what former files have imported out of its way as well, as torch's compiler."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors or shared memory behind.

    The state is compared with that at the test's begin, so what a fixture of wider scope made is
    not counted. A test that shares long-lived workers, which may start a thread or connect to a
    peer at their first use, says what may stay: ``@pytest.mark.keeps("threads", "descriptors")``.
    """
    kept = _kinds_kept(request)
    before = take_state()
    yield
    leaks = find_leaks(before, kept)
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _kinds_kept(request: pytest.FixtureRequest) -> set[str]:
    kept = {kind for marker in request.node.iter_markers("keeps") for kind in marker.args}
    unknown = kept.difference(KINDS)
    if unknown:
        raise pytest.UsageError(f"keeps() takes {KINDS}, not {unknown}")
    return kept
