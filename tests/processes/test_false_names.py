"""A member calls functions of Weft in the name of another one, which does not notice."""

from __future__ import annotations

from pathlib import Path

from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes import false_names
from tests.processes.false_names import HONEST, LIAR, LIES, RANKS, SERVER


def test_calls_in_the_name_of_another_worker(warm_process: WarmProcess, tmp_path: Path) -> None:
    workers = OpenWorkers(warm_process, "tests.processes.false_names")
    try:
        for name in RANKS:
            workers.begin(name, false_names.join, name, f"file://{tmp_path / 'store'}")
        for name in RANKS:
            workers.result(name)
        workers.do(HONEST, false_names.begin, str(tmp_path / "snapshots"))
        told = {lie: workers.do(LIAR, false_names.tell, lie) for lie in LIES}
        found = workers.do(HONEST, false_names.finish)
    finally:
        for name in (LIAR, SERVER, HONEST):
            workers.kill(name)
        workers.close()
    for lie, outcome in told.items():
        assert outcome.startswith(false_names.expected(lie)), (lie, outcome)
        if outcome.startswith("NotAllowed"):
            assert f"that is for '{HONEST}'" in outcome or SERVER in outcome, outcome
    assert found == {
        "moved": [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]],
        "inside": [HONEST],
        "written": True,
        "version": 1,
    }
