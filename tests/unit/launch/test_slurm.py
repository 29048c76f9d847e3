"""The options of ``--on slurm``, without a SLURM."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch import slurm
from torchweft.launch.slurm import BatchJob, Slurm, ask, state_of

nodes = slurm._nodes


@pytest.fixture(autouse=True)
def with_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr(slurm, "_nodes", lambda text: ["n1", "n2", "n3"])
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")


@pytest.mark.usefixtures("allocation")
def test_an_allocation_is_used() -> None:
    assert Slurm(workers_per_node=2).count(None) == 6
    first, second = Slurm(2, 3).hosts(6)
    assert (first.name, first.workers, second.name) == ("n1", 3, "n2")
    assert first.command[0] == "srun"
    assert {"--jobid=12", "--nodelist=n1", "--overlap"} <= set(first.command)
    with pytest.raises(ConfigurationError, match="4 nodes are wanted, but job 12 has 3"):
        Slurm(4)


@pytest.mark.usefixtures("allocation")
def test_a_task_of_several_has_no_allocation_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert Slurm(5).count(None) == 5


def test_nodes_that_commands_would_take_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ask", lambda *command: "n1\n-oops\n")
    for text in ("n1,-oops", "-oops"):
        with pytest.raises(ConfigurationError, match="names a node '-oops', which begins with a"):
            nodes(text)


def test_a_command_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match=r"'scontrol', a command of SLURM, cannot be run: .*file"):
        ask("scontrol", "ping")
    assert state_of("1") == ""


def test_a_submission_that_is_not_answered_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hanging = tmp_path / "sbatch"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "_SUBMIT_LIMIT_S", 0.1)
    with pytest.raises(LaunchError, match=r"sbatch has not answered within 0.1 s.*squeue --me"):
        BatchJob.submit("true", [])
