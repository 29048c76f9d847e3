from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchweft import probe
from torchweft.errors import ProtocolError
from torchweft.probe import (
    Facts,
    clock_id,
    is_loopback,
    network_id,
    own_address_towards,
    read_facts,
)


def test_what_the_system_does_not_tell_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("BOOT_ID", "NAMESPACES"):
        monkeypatch.setattr(probe, place, tmp_path / "absent")
    facts = read_facts()
    assert (facts.boot_id, facts.pid_namespace) == ("", 0)
    assert network_id() == clock_id() == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pid", "12"),
        ("pid", None),
        ("boot_id", 3),
        ("hostname", ["node7"]),
        ("uid", 1.5),
    ],
)
def test_facts_of_the_wrong_type_are_refused(name: str, value: object) -> None:
    data = read_facts().as_json() | {name: value}
    with pytest.raises(ProtocolError, match=name):
        Facts.from_json(data)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from torchweft.probe import read_facts; "
        "read_facts(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_own_address_on_the_way_to_a_host() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert is_loopback(own_address_towards("localhost"))
    assert own_address_towards("no.such.host.invalid") == ""


def test_a_name_that_means_loopback_here_alone_means_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = socket.getaddrinfo("127.0.1.1", 9, type=socket.SOCK_DGRAM)
    way_out = own_address_towards("192.0.2.1")
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **options: (
            found if host == "node0" else resolve(host, *args, **options)
        ),
    )
    assert own_address_towards("node0") == (way_out or "127.0.0.1")
