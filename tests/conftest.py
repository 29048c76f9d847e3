"""Gives every test one compute thread, and checks that it leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

# Before torch is imported anywhere: the machine's cores are for the workers of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.leaks import KINDS, State, settle, take_state
from tests.thorough import examples

# No property is about time, and a shared machine has slow moments.
settings.register_profile("weft", deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile("weft")

MODULES = 200
"""The garbage collector looks no more at imported modules once there are so many more."""


def pytest_collection_finish() -> None:
    """Keeps the objects and loggers that imports create from slowing down every test.

    The garbage collector would scan a third of a million objects. Pytest looks at each logger six
    times a test, and adds its handlers to those that do not propagate. Torch has two hundred.
    """
    _Watch.modules = len(sys.modules)
    gc.freeze()
    loggers = logging.root.manager.loggerDict
    for name, logger in list(loggers.items()):
        if name.startswith("torch.") or not getattr(logger, "propagate", True):
            logger.propagate = True  # type: ignore[union-attr]
            del loggers[name]


class _Watch:
    """The state with which that at the end of a test is compared, and the number of modules."""

    before: State | None = None
    modules = 0


@pytest.hookimpl(wrapper=True, trylast=True)  # while pytest captures the output
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    if _Watch.before is None:
        _Watch.before = take_state()
    if len(sys.modules) > _Watch.modules + MODULES:
        _Watch.modules = len(sys.modules)
        gc.collect()
        gc.freeze()  # what tests have imported, such as torch's compiler
    yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
    result = yield
    if fixturedef.scope != "function":
        _Watch.before = take_state()  # What a wider fixture has is no leak of a test.
    return result


@pytest.hookimpl(wrapper=True, trylast=True)  # while pytest captures the output
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors, shared memory or settings behind.

    The state is compared with that at the start of the test, so resources of wider fixtures do not
    count. Long-lived workers that tests share may start a thread or connect to a peer at first use.
    Such a test declares what may stay: ``@pytest.mark.keeps("threads", "descriptors")``. This is no
    fixture, because one costs a test more than the comparison.
    """
    before, _Watch.before = _Watch.before, None
    yield
    assert before is not None
    leaks, _Watch.before = settle(before, _kinds_kept(item))
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _kinds_kept(item: pytest.Item) -> set[str]:
    kept = {kind for marker in item.iter_markers("keeps") for kind in marker.args}
    unknown = kept.difference(KINDS)
    if unknown:
        raise pytest.UsageError(f"keeps() takes {KINDS}, not {unknown}")
    return kept
