"""Runs and clusters over hosts, whose agents are processes of this host."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.weft_run import is_running, wait_until_gone
from torchweft import rpc
from torchweft.errors import HostError, LaunchError
from torchweft.launch import Host, HostsLauncher, Order, RestartPolicy
from torchweft.launch.console import BinarySink, Console
from torchweft.launch.hosts import CommandLink, HostNurseries
from torchweft.launch.job import Job, program_job
from torchweft.launch.worker import WorkerSpec
from torchweft.scraping import Address

AGENT = (sys.executable, "-m", "torchweft.launch.host_agent")
LIMIT_S = 20.0


class Here(HostsLauncher):
    """Two hosts that are this one."""

    def __init__(self, *commands: Sequence[str], timeout_s: float = LIMIT_S) -> None:
        self._commands = commands or (AGENT, AGENT)
        self._timeout_s = timeout_s

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Here:
        return cls()

    def hosts(self, workers: int) -> list[Host]:
        share = workers // len(self._commands)
        return [
            Host(
                f"host{number}",
                "127.0.0.1",
                share,
                tuple(command),
                self._timeout_s if command != AGENT else LIMIT_S,
            )
            for number, command in enumerate(self._commands)
        ]


class Output:
    """What a console has written."""

    def __init__(self) -> None:
        self._out, self._err = io.BytesIO(), io.BytesIO()
        self.console = Console(BinarySink(self._out), BinarySink(self._err))  # type: ignore[arg-type]

    @property
    def out(self) -> list[str]:
        return sorted(self._out.getvalue().decode().splitlines())

    @property
    def err(self) -> str:
        return self._err.getvalue().decode()


def python(body: str) -> Job:
    return program_job([sys.executable, "-c", body])


def run(job: Job, launcher: HostsLauncher | None = None, count: int = 4, **others: Any) -> Any:
    output = Output()
    order = Order([f"worker{rank}" for rank in range(count)], job, output.console, **others)
    return (launcher or Here()).run(order), output


def test_workers_of_two_hosts_know_their_places() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE WEFT_WORKER_NAME MASTER_ADDR"
    status, output = run(python(f"import os; print(*map(os.environ.get, {names.split()}))"))
    assert status == 0
    assert output.out == [
        f"[worker{rank}] {rank} 4 {rank % 2} 2 worker{rank} 127.0.0.1" for rank in range(4)
    ]


def test_a_group_over_hosts_starts_again_at_another_port(tmp_path: Path) -> None:
    body = (
        "import os, sys; life = os.environ['WEFT_RESTART_COUNT']; "
        "print(os.environ['RANK'] + ' ' + life + ' ' + os.environ['MASTER_PORT']); "
        "sys.exit(life == '0' and os.environ['RANK'] == '1')"
    )
    policy = RestartPolicy(limit=1, backoff_s=0.01)
    status, output = run(python(body), count=2, restarts=policy)
    assert status == 0
    lives = [line.split()[1:] for line in output.out]
    assert [life[:2] for life in lives][-1] == ["1", "1"]
    assert len({port for _, life, port in lives if life == "1"}) == 1
    assert {port for _, life, port in lives if life == "0"} != {lives[-1][2]}


def test_the_secret_is_in_a_private_file_only() -> None:
    body = (
        "import os; path = os.environ['WEFT_SECRET_FILE']; "
        "print(oct(os.stat(path).st_mode & 0o777), oct(os.stat(os.path.dirname(path)).st_mode "
        "& 0o777), len(open(path).read()), path, 'WEFT_SECRET' in os.environ)"
    )
    _, output = run(python(body), count=2)
    for line in output.out:
        _, file_mode, folder_mode, size, path, is_bare = line.split()
        assert (file_mode, folder_mode, size, is_bare) == ("0o600", "0o700", "64", "False")
        assert not os.path.exists(os.path.dirname(path))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("no-such-command",), "no command 'no-such-command' here.*on host 'host1'; install it"),
        (
            ("sh", "-c", "echo no route to host >&2; exit 255"),
            "host 'host1' cannot be reached: sh ended with exit code 255; it said: no route",
        ),
        (("sleep", "100"), "host 'host1' cannot be reached: no answer within 0.5 s"),
        (
            (sys.executable, "-c", "import torchweft.launch.none"),
            "host 'host1' cannot be reached.*ModuleNotFoundError",
        ),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(command: Sequence[str], message: str) -> None:
    timeout_s = 0.5 if command[0] == "sleep" else LIMIT_S
    begin_s = time.monotonic()
    with pytest.raises(HostError, match=message) as caught:
        run(python(""), Here(AGENT, command, timeout_s=timeout_s))
    assert caught.value.host == "host1"
    assert time.monotonic() - begin_s < LIMIT_S


class Followed:
    """Workers whose events are read by hand."""

    def __init__(self, hosts: Sequence[Host] = ()) -> None:
        self.hosts = hosts or Here().hosts(2)
        self.nurseries = HostNurseries(
            self.hosts,
            {"a": self.hosts[0], "b": self.hosts[1]},
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.pids: dict[str, int] = {}

    def start(self, name: str) -> None:
        job = python("import signal; signal.pause()")
        self.nurseries.start(name, WorkerSpec(name, 0, job, {}, ""))
        while name not in self.pids:
            self.pids |= {event["key"]: event["pid"] for event in self.receive()}

    def receive(self) -> list[Any]:
        """Waits for events and returns them."""
        ready, _, _ = select.select([self.nurseries], [], [], LIMIT_S)
        assert ready
        return self.nurseries.receive()

    @property
    def agents(self) -> list[int]:
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())],
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
        return [int(pid) for pid, arguments in lines if "host_agent" in arguments]


def test_a_lost_host_is_named_and_all_workers_end() -> None:
    followed = Followed()
    try:
        followed.start("a")
        followed.start("b")
        os.kill(followed.agents[1], signal.SIGKILL)
        with pytest.raises(HostError, match=r"host 'host1' was lost: its agent ended"):
            followed.receive()
        wait_until_gone([followed.pids["b"]], LIMIT_S)
        assert is_running(followed.pids["a"])
    finally:
        followed.nurseries.close()
    wait_until_gone(list(followed.pids.values()), LIMIT_S)


def variable_of(pid: int, name: str) -> str:
    """Waits until a worker is the program that it becomes, and returns a variable of it."""
    found: dict[str, str] = {}

    def look() -> bool:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update(os.fsdecode(each).partition("=")[::2] for each in pairs if each)
        return name in found

    functions.wait_until(look, lambda: str(found))
    return found[name]


def test_a_signal_to_an_agent_is_told_and_is_a_notice() -> None:
    followed = Followed()
    try:
        followed.start("a")
        path = Path(variable_of(followed.pids["a"], "WEFT_NOTICE_FILE"))
        assert not path.exists()
        os.kill(followed.agents[0], signal.SIGTERM)
        with pytest.raises(HostError, match="host 'host0' was asked to end by a signal"):
            followed.receive()
        assert path.exists()
    finally:
        followed.nurseries.close()


def test_a_signal_to_a_worker_is_sent_where_it_runs() -> None:
    followed = Followed()
    try:
        followed.start("a")
        followed.start("b")
        followed.nurseries.signal(["b", "unknown"], signal.SIGUSR1)
        events: list[Any] = []
        while not events or events[-1]["event"] == "output":  # the ends of its streams
            events += followed.receive()
        assert events[-1] == {
            "event": "ended",
            "key": "b",
            "exit_code": -signal.SIGUSR1,
            "is_memory_kill": None,
        }
        followed.nurseries.signal(["b"], signal.SIGUSR1)  # It has ended; nothing happens.
        assert is_running(followed.pids["a"])
    finally:
        followed.nurseries.close()


def test_a_run_with_much_unread_output_ends_soon() -> None:
    followed = Followed()
    job = python("while True: print('x' * 100)")
    try:
        followed.nurseries.start("a", WorkerSpec("a", 0, job, {}, ""))
        events: list[Any] = []
        while not any(event["event"] == "output" for event in events):
            events = followed.receive()
        assert events[-1]["data"].startswith(b"x")
        begin_s = time.monotonic()
    finally:
        followed.nurseries.close()
    assert time.monotonic() - begin_s < 5.0


def test_a_silent_launcher_is_taken_for_gone() -> None:
    body = (
        "from torchweft.launch import host_agent; "
        "host_agent.SILENCE_S = 0.2; host_agent.ALIVE_S = 0.1; host_agent.main()"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with agent:
        assert agent.wait(LIMIT_S) == 0


class StoppedLink(CommandLink):
    """A link whose agent can be stopped, and that waits only then for a short time."""

    def __init__(self, command: tuple[str, ...]) -> None:
        super().__init__(command)
        self.has_new_limit = threading.Event()

    def stop_agent(self) -> None:
        self._silence_s = 0.5
        self.has_new_limit.wait(LIMIT_S)
        os.kill(self._process.pid, signal.SIGSTOP)

    def receive(self) -> bytes:
        if self._silence_s < 1.0:
            self.has_new_limit.set()
        return super().receive()


def test_a_silent_agent_is_taken_for_lost() -> None:
    body = "from torchweft.launch import host_agent; host_agent.ALIVE_S = 0.1; host_agent.main()"
    links: list[StoppedLink] = []

    def connect() -> StoppedLink:
        links.append(StoppedLink((sys.executable, "-c", body)))
        return links[-1]

    silent = Host("host1", "127.0.0.1", 1, connect=connect)
    followed = Followed([*Here(AGENT).hosts(1), silent])
    try:
        followed.start("a")
        followed.start("b")
        links[0].stop_agent()
        message = r"'host1' was lost: its agent ended \(nothing was heard of it for 0.5 s"
        with pytest.raises(HostError, match=message):
            followed.receive()
        wait_until_gone([followed.pids["b"]], LIMIT_S)
        assert is_running(followed.pids["a"])
    finally:
        followed.nurseries.close()


@pytest.mark.keeps("descriptors")  # The first TCP store of a process leaves a pipe open.
def test_a_cluster_over_hosts() -> None:
    with torchweft.cluster(2, on=Here()) as cluster:
        assert cluster.names == ["worker0", "worker1"]
        for name in cluster.names:
            assert rpc.rpc_sync(name, functions.name_here) == name
        total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        assert total.tolist() == [2, 2]
        pids = list(cluster.pids.values())
        os.kill(cluster.pids["worker1"], signal.SIGKILL)
        wait_until_gone([cluster.pids["worker1"]], LIMIT_S)
        with pytest.raises(LaunchError, match=r"worker 'worker1'.*killed by SIGKILL"):
            cluster.close()
    wait_until_gone(pids, LIMIT_S)


def test_workers_of_each_host_serve_their_metrics_at_ports_from_the_first_one() -> None:
    body = "import os; print(os.environ['WEFT_METRICS'], os.environ['LOCAL_RANK'])"
    status, output = run(python(body), metrics=Address("127.0.0.1", 9400))
    assert status == 0
    assert output.out == [f"[worker{rank}] 127.0.0.1:9400 {rank % 2}" for rank in range(4)]
    assert output.err.startswith("torchweft run: metrics: worker0 http://127.0.0.1:9400/metrics on")


def test_a_host_without_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = ("sh", "-c", f"cd / && rmdir {folder} && exec {' '.join(AGENT)}")
    with pytest.raises(HostError, match=r"there is no folder '.*gone'"):
        run(python(""), Here(command), count=1)
