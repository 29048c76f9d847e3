"""Gives every test one compute thread, and checks that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: the machine's cores are for the workers of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.leaks import KINDS, State, settle, take_state
from tests.thorough import THOROUGH, examples

# No property is about time, and a shared machine has slow moments.
settings.register_profile("weft", deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile("weft")

pytest_plugins = ["tests.groups", "tests.inside", "tests.contract.launchers.slurm_cluster"]
"""Where the fixtures are that several folders use."""

MODULES = 200
"""The garbage collector stops to scan imported modules when there are so many new ones."""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A job in the background of a shell ignores Ctrl-C, as its processes would.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(LeakCheck())


def pytest_collection(session: pytest.Session) -> None:
    """Has each of several processes compile a share of the tests, not all of them.

    Each collects all tests. Pytest adds its messages to their ``assert`` statements first, which
    takes longer than the rest, and keeps the compiled files for the next process that needs them.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1:
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    root = session.config.rootpath
    files = sorted(file for each in session.config.args for file in Path(each).rglob("test_*.py"))
    for file in files[number::count]:
        name = ".".join(file.absolute().relative_to(root).with_suffix("").parts)
        # The collection imports it again, and tells why it cannot.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before the tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folders = item.path.relative_to(item.config.rootpath).parts
        if "launchers" in folders:
            item.add_marker(pytest.mark.launcher)
        if "end_to_end" in folders and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(END_TO_END_LIMIT_S))
        if item.get_closest_marker("thorough") is not None and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="make thorough runs it"))


def pytest_collection_finish() -> None:
    """Keeps loggers that imports create from slowing down every test.

    Pytest looks at each logger six times a test, and adds its handlers to those that do not
    propagate. Torch has two hundred.
    """
    loggers = logging.root.manager.loggerDict
    for name, logger in list(loggers.items()):
        if name.startswith("torch.") or not getattr(logger, "propagate", True):
            logger.propagate = True  # type: ignore[union-attr]
            del loggers[name]


END_TO_END_LIMIT_S = 240.0
"""Time limit of an end-to-end test without its own, as many interpreters import torch slowly."""

_modules = 0
"""The number of modules whose objects the garbage collector leaves alone."""


def pytest_runtest_setup() -> None:
    """Has the garbage collector scan no modules: they have a third of a million objects."""
    global _modules
    if len(sys.modules) > _modules + MODULES:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


class LeakCheck:
    """Fails a test that leaves threads, processes, descriptors, shared memory or settings behind.

    The state is compared with that at the start of the test, so resources of wider fixtures do not
    count. Long-lived workers that tests share may start a thread or connect to a peer at first use.
    Such a test declares what may stay: ``@pytest.mark.keeps("threads", "descriptors")``. This is a
    plugin: a fixture costs a test more than the comparison does.
    """

    def __init__(self) -> None:
        self._before: State | None = None

    @pytest.hookimpl(wrapper=True, trylast=True)  # while pytest captures the output
    def pytest_runtest_setup(self) -> Iterator[None]:
        if self._before is None:
            self._before = take_state()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        result = yield
        if fixturedef.scope != "function":
            self._before = take_state()
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        before, self._before = self._before, None
        yield
        assert before is not None
        leaks, self._before = settle(before, _kinds_kept(item))
        if leaks:
            pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _kinds_kept(item: pytest.Item) -> set[str]:
    kept = {kind for marker in item.iter_markers("keeps") for kind in marker.args}
    unknown = kept.difference(KINDS)
    if unknown:
        raise pytest.UsageError(f"keeps() takes {KINDS}, not {unknown}")
    return kept
