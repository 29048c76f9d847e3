"""A member lies about others to a strict worker: it is turned away, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import lies
from tests.processes.lies import HONEST, LIAR, LIES, VICTIM, WITHOUT_EFFECT

_WORK_S = 2.5


@pytest.fixture
def workers(warm_process: WarmProcess, tmp_path: Path) -> Iterator[OpenWorkers]:
    started = OpenWorkers(warm_process, "tests.processes.lies")
    for name in (HONEST, VICTIM, LIAR):
        started.begin(name, lies.join, name, f"file://{tmp_path / 'store'}")
    for name in (HONEST, VICTIM, LIAR):
        started.result(name)
    yield started
    for name in (HONEST, VICTIM, LIAR):
        started.kill(name)
    started.close()


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_others_harms_only_the_liar(workers: OpenWorkers, lie: str) -> None:
    workers.begin(HONEST, lies.work, _WORK_S)
    outcome = workers.do(LIAR, lies.tell, lie)
    assert workers.result(HONEST) > 1
    assert outcome in ("turned away", "without effect")
    if lie not in WITHOUT_EFFECT:
        assert outcome == "turned away"
    assert workers.do(HONEST, lies.graphs_kept) == 0
