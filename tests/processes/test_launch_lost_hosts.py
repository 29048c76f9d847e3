"""A host whose agent is killed is asked for again, and its worker comes back under its name."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import torchweft
from torchweft import rpc
from torchweft.errors import HostError, LaunchError, WeftError
from torchweft.launch import Host, HostsLauncher

LIMIT_S = 30.0
AGENT = (sys.executable, "-m", "torchweft.launch.host_agent")


class Agents(HostsLauncher):
    """Starts agents on this host; a lost one is replaced while ``flag`` exists."""

    replaces_hosts = True

    def __init__(self, flag: Path) -> None:
        self._command = ("sh", "-c", 'test -e "$0" && exec "$@"', str(flag), *AGENT)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Agents:
        raise NotImplementedError

    def hosts(self, workers: int) -> Sequence[Host]:
        return [Host(f"host{n}", "127.0.0.1", 1, self._command) for n in range(workers)]


def life() -> tuple[int, int]:
    return int(os.environ["WEFT_RESTART_COUNT"]), os.getpid()


def kill_agent() -> None:
    """Kills the agent of this worker: the parent of the nursery, which is its parent."""
    nursery = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(nursery.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(LIMIT_S)


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = [str(Path(torchweft.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    flag = tmp_path / "flag"
    flag.touch()
    return flag


@pytest.mark.keeps("descriptors")  # The first TCP store of a process leaves a pipe open.
@pytest.mark.usefixtures("quick_restarts")
def test_a_worker_of_a_lost_host_comes_back(flag: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torchweft.cluster(workers=2, on=Agents(flag), restarts=1) as group:
        former = rpc.rpc_sync("worker0", life)
        with pytest.raises(WeftError):
            rpc.rpc_sync("worker1", kill_agent)
        group.wait_for("worker1", LIMIT_S)
        assert rpc.rpc_sync("worker1", life) == (1, group.pids["worker1"])
        assert rpc.rpc_sync("worker0", life) == former
    told = capsys.readouterr().err
    assert "ended, as host 'host1' was lost: its agent ended (sh ended with exit code -9)" in told


@pytest.mark.keeps("descriptors")
def test_a_lost_host_that_does_not_come_back(flag: Path) -> None:
    group = torchweft.cluster(workers=2, on=Agents(flag), restarts=1).start()
    flag.unlink()
    with pytest.raises(WeftError):
        rpc.rpc_sync("worker1", kill_agent)
    with pytest.raises(
        HostError, match="host 'host1' cannot be reached: sh ended with exit code 1"
    ):
        group.wait_for("worker1", LIMIT_S)
    with pytest.raises(LaunchError):
        group.close()
