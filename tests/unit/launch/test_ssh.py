"""Lists of hosts, the workers of each, and the commands that start agents there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from torchweft.errors import ConfigurationError, HostError
from torchweft.launch import ssh
from torchweft.launch.hosts_launcher import forwarded, local_places, place
from torchweft.launch.ssh import Ssh


@pytest.fixture(autouse=True)
def no_ssh_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr(Ssh, "_address_of", lambda self, name: f"address of {name}")


_address_of = Ssh._address_of


def workers(text: str, count: int) -> list[tuple[str, int]]:
    return [(host.name, host.workers) for host in Ssh(text).hosts(count)]


def test_workers_fill_the_hosts_in_order() -> None:
    assert workers("a:2,b:4", 6) == [("a", 2), ("b", 4)]
    assert workers("a:2,b:4", 3) == [("a", 2), ("b", 1)]
    assert workers("a:2,b:4", 1) == [("a", 1)]
    assert workers("a,b:4", 5) == [("a", 1), ("b", 4)]
    assert workers("a,b,c", 5) == [("a", 2), ("b", 2), ("c", 1)]
    assert workers("a,b,c", 2) == [("a", 1), ("b", 1)]
    assert workers("me@a, [::1]:2", 3) == [("me@a", 1), ("::1", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has ''; write it like a,b:4"),
        ("a,", "has ''; write it like a,b:4"),
        ("a:x", "has 'a:x'"),
        ("-oProxyCommand=x", "and options in --ssh-options"),
        ("[-oProxyCommand=x]:2", "write it like a,b:4"),
        ("me@-oProxyCommand=x", "write it like a,b:4"),
        ("-l@a", "write it like a,b:4"),
        ("a;touch x", "write it like a,b:4"),
        ("$(touch x)", "write it like a,b:4"),
        ("a\nb", "write it like a,b:4"),
        ("me@", "write it like a,b:4"),
        ("a:0", "host 'a' is to have 0 workers"),
        ("a,b,a:2", "host 'a' is twice in the list; name it once, as a:2"),
    ],
)
def test_lists_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Ssh(text)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a folder")
    (host,) = Ssh("a", connect_timeout=3, options="-p 22 -i 'my key'").hosts(1)
    assert host.command[:4] == ("ssh", "-T", "-o", "BatchMode=yes")
    assert "ConnectTimeout=3" in host.command
    assert host.command[-7:-2] == ("-p", "22", "-i", "my key", "--")
    agent = f"{sys.executable} -m torchweft.launch.host_agent"
    assert host.command[-2:] == ("a", f"exec env 'PYTHONPATH=/a folder' {agent}")
    assert host.address == "address of a"


def test_places_on_the_hosts() -> None:
    hosts = Ssh("a:1,b:2").hosts(3)
    placed = place(["ps", "t0", "t1"], hosts)
    assert [host.name for host in placed.values()] == ["a", "b", "b"]
    assert local_places(placed) == {"ps": (0, 1), "t0": (0, 2), "t1": (1, 2)}


def test_variables_that_go_along() -> None:
    variables = {
        "WEFT_RPC_TIMEOUT_S": "5",
        "PYTHONUNBUFFERED": "1",
        "WEFT_SECRET": "not along",
        "WEFT_SECRET_FILE": "/of/this/host",
        "WEFT_LISTEN": "10.0.0.1",
        "HOME": "/root",
    }
    assert forwarded(variables) == {"WEFT_RPC_TIMEOUT_S": "5", "PYTHONUNBUFFERED": "1"}


def test_a_configuration_that_hangs_is_told_with_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hanging = tmp_path / "ssh"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ssh, "_CONFIGURATION_LIMIT_S", 0.1)
    with pytest.raises(HostError, match="host 'a': 'ssh -G' has not read") as caught:
        _address_of(Ssh("a"), "a")
    assert caught.value.host == "a"
