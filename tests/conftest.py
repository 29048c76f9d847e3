"""Gives every test one compute thread, and checks that it leaves nothing behind."""

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

# No property is about time, and a shared machine has slow moments.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")


def pytest_collection_finish() -> None:
    """Keeps the objects and loggers that imports create from slowing down every test.

    The garbage collector would scan a third of a million objects. Torch has fifty loggers that do
    not propagate: pytest adds its handler to each such logger, three times a test.
    """
    gc.freeze()
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Freezes what earlier test files have imported as well, such as torch's compiler."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors, shared memory or settings behind.

    The state is compared with that at the start of the test, so resources of wider fixtures do not
    count. Long-lived workers that tests share may start a thread or connect to a peer at first use.
    Such a test declares what may stay: ``@pytest.mark.keeps("threads", "descriptors")``.
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
