from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchweft import probe
from torchweft.errors import ProtocolError
from torchweft.probe import Facts, cuda_devices, read_facts, usable_cores


def test_facts_survive_json() -> None:
    facts = read_facts()
    assert Facts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def test_facts_are_those_of_this_process() -> None:
    facts = read_facts()
    assert facts.pid == os.getpid()
    assert facts.uid == os.geteuid()
    assert facts.net_namespace == os.stat("/proc/self/ns/net").st_ino
    assert facts.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert facts.ipc_namespace == os.stat("/proc/self/ns/ipc").st_ino
    assert 1 <= facts.cpu_count == len(usable_cores()) <= (os.cpu_count() or 1)


def test_the_host_is_known_by_its_boot_and_its_name() -> None:
    facts = read_facts()
    assert dataclasses.replace(facts, pid=1).host_id == facts.host_id
    assert dataclasses.replace(facts, boot_id="another").host_id != facts.host_id
    assert dataclasses.replace(facts, hostname="another").host_id != facts.host_id


def test_what_the_system_does_not_tell_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("BOOT_ID", "NAMESPACES", "NVIDIA_DEVICES", "RDMA_DEVICES"):
        monkeypatch.setattr(probe, place, tmp_path / "absent")
    facts = read_facts()
    assert (facts.boot_id, facts.net_namespace, facts.pid_namespace) == ("", 0, 0)
    assert (facts.cuda_devices, facts.rdma_devices) == ((), ())


def test_devices_are_read_from_the_driver_s_files(tmp_path: Path) -> None:
    for bus, identifier in (("0000:02:00.0", "GPU-b"), ("0000:01:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t Something\nGPU UUID: \t {identifier}\nDevice Minor: \t 0\n"
        (tmp_path / bus / "information").write_text(text)
    (tmp_path / "0000:03:00.0").mkdir()
    assert cuda_devices(tmp_path) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pid", "12"),
        ("pid", None),
        ("boot_id", 3),
        ("cuda_devices", "GPU-a"),
        ("rdma_devices", [1]),
        ("cuda_visible", 0),
    ],
)
def test_facts_of_the_wrong_type_are_refused(name: str, value: object) -> None:
    data = read_facts().as_json() | {name: value}
    with pytest.raises(ProtocolError, match=name):
        Facts.from_json(data)


@pytest.mark.parametrize("data", [None, [], {}, "pid"])
def test_what_is_no_description_is_refused(data: object) -> None:
    with pytest.raises(ProtocolError):
        Facts.from_json(data)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from torchweft.probe import read_facts; "
        "read_facts(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
