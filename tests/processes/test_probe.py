"""``torchweft probe``: a worker that answers, one that is stopped, and none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import torchweft
from tests.command_line import said_by
from tests.contract.processes.functions import stop
from torchweft import knobs
from torchweft.launch import Nursery
from torchweft.observe import group
from torchweft.reports import process_at
from torchweft.secret import write_new


def only(pids: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has observers see only these workers of the host, as in a container."""
    everywhere = group.listeners_here
    monkeypatch.setattr(
        group,
        "listeners_here",
        lambda: [each for each in everywhere() if process_at(each) in pids],
    )


def test_a_worker_that_does_not_answer_fails_the_probe(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torchweft.cluster(workers=1, nursery=nursery) as cluster:
        pid = cluster.pids["worker0"]
        only({pid}, monkeypatch)
        assert said_by("probe") == said_by("probe", "--joined") == (0, "", "")
        monkeypatch.setattr(group, "_FIND_S", 0.3)
        stop(pid)
        try:
            status, _, said = said_by("probe")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert status == 1
        assert f"a worker does not answer within 0.3 s: its process {pid} is stopped" in said


def test_a_worker_with_another_secret_answers(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with torchweft.cluster(workers=1, nursery=nursery) as cluster:
        only({cluster.pids["worker0"]}, monkeypatch)
        write_new(tmp_path / "secret")
        with knobs.SECRET_FILE.override(str(tmp_path / "secret")):
            assert said_by("probe", "--joined") == (0, "", "")


def test_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(set(), monkeypatch)
    assert said_by("probe") == (0, "", "")
    assert said_by("probe", "--joined") == (1, "", "")
    # Before the file with the secret is there, no worker has joined.
    monkeypatch.setenv("WEFT_SECRET_FILE", str(tmp_path / "none"))
    assert said_by("probe")[0] == 0
    assert said_by("probe", "--joined")[0] == 1
