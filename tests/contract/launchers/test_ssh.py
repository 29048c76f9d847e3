"""``torchweft run --on ssh`` and ``cluster(on=Ssh(...))`` over a real ``sshd``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import torchweft
from tests.contract.launchers.commands import (
    HELLO,
    TORCHWEFT,
    environment,
    finished,
    greetings,
    joined,
    started,
)
from tests.contract.launchers.sshd import Sshd
from tests.contract.processes.weft_run import PROMPT_S, read_pids, wait_until_gone
from torchweft import rpc
from torchweft.launch import Ssh

LIMIT_S = 20.0

WAITING = "import os, signal, sys; print(os.getpid(), flush=True); signal.pause()"

SECRET = """
import os
from pathlib import Path
secret = Path(os.environ["WEFT_SECRET_FILE"]).read_bytes()
shown = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
print(secret.decode(), secret in shown)
"""


def command(server: Sshd, hosts: str, program: str, *options: str) -> list[str]:
    given = ["--on", "ssh", "--hosts", hosts, "--ssh-options", server.options]
    return [*TORCHWEFT, "run", *given, *options, program]


@pytest.fixture
def start(
    server: Sshd, tmp_path: Path
) -> Callable[[str], AbstractContextManager[subprocess.Popen[str]]]:
    script = tmp_path / "script.py"

    def start_script(body: str) -> AbstractContextManager[subprocess.Popen[str]]:
        script.write_text(body)
        return started(command(server, "alpha:2,beta", str(script)), cwd=tmp_path)

    return start_script


Start = Callable[[str], AbstractContextManager["subprocess.Popen[str]"]]


@pytest.mark.smoke
def test_workers_of_two_hosts_find_each_other(server: Sshd) -> None:
    done = finished(command(server, "alpha:2,beta", HELLO))
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout) == greetings(3)
    assert "[worker2] joined worker2" in done.stdout


def test_no_argument_list_and_no_log_has_the_secret(start: Start, server: Sshd) -> None:
    with start(SECRET) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    secrets = {line.split()[1] for line in out.splitlines()}
    assert [line.split()[2] for line in out.splitlines()] == ["False"] * 3
    assert len(secrets) == 1
    assert secrets.pop() not in err + server.log.read_text()


@pytest.mark.parametrize(
    ("host", "reason"), [("closed", "Connection refused"), ("silent", "timed out")]
)
def test_a_host_that_cannot_be_reached_is_named_in_time(
    host: str, reason: str, server: Sshd
) -> None:
    begin_s = time.monotonic()
    done = finished(command(server, f"alpha,{host}", HELLO, "--connect-timeout", "1"))
    assert done.returncode == 1
    assert (
        f"torchweft run: host '{host}' cannot be reached: ssh ended with exit code" in done.stderr
    )
    assert reason in done.stderr
    assert time.monotonic() - begin_s < LIMIT_S


def test_an_interpreter_that_is_not_there(server: Sshd) -> None:
    done = finished(command(server, "alpha", HELLO, "--python", "/no/such/python"))
    assert done.returncode == 1
    assert "host 'alpha' cannot be reached" in done.stderr
    assert "/no/such/python" in done.stderr


def test_ctrl_c_ends_the_workers_of_all_hosts(start: Start) -> None:
    with start(WAITING) as process:
        pids = read_pids(process, 3)
        process.send_signal(signal.SIGINT)
        wait_until_gone(pids, PROMPT_S)
        assert process.wait(LIMIT_S) == 130


def test_nothing_is_left_of_a_launcher_that_is_killed(start: Start) -> None:
    with start(WAITING) as process:
        pids = read_pids(process, 3)
        process.kill()
        wait_until_gone(pids, LIMIT_S)


def test_nothing_is_left_when_a_connection_ends(start: Start, server: Sshd) -> None:
    with start(WAITING) as process:
        pids = read_pids(process, 3)
        os.kill(server.sessions()[0], signal.SIGKILL)
        wait_until_gone(pids, LIMIT_S)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "was lost: its agent ended" in err


@pytest.mark.keeps("descriptors")  # The first TCP store of a process leaves a pipe open.
def test_a_cluster(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with torchweft.cluster(on=Ssh("alpha,beta", options=server.options)) as cluster:
        for name in cluster.names:
            assert rpc.rpc_sync(name, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]


@pytest.mark.timeout(180)
def test_the_doctor_examines_other_hosts(server: Sshd) -> None:
    on = f"ssh --hosts alpha,beta --ssh-options '{server.options}'"
    done = finished([*TORCHWEFT, "doctor", "--on", on, "--json"])
    findings = json.loads(done.stdout)["findings"]
    versions = [each for each in findings if each["check"] == "versions"]
    assert [(each["level"], each["where"]) for each in versions] == [("ok", "all workers")] * 3
    pairs = {each["where"] for each in findings if each["check"] == "pair"}
    names = ("driver", "worker0", "worker1")
    assert pairs == {f"{one} -> {other}" for one in names for other in names if one != other}


def test_the_doctor_on_a_launcher_without_its_options() -> None:
    done = finished([*TORCHWEFT, "doctor", "--on", "ssh"])
    assert done.returncode == 2
    assert "torchweft doctor: ssh needs hosts" in done.stderr
