"""``torchweft doctor`` on this host, and in surroundings that are broken on purpose."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "torchweft", "doctor", "--json"]
LIMIT_S = 90.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def run(before: Any = None, wrapper: tuple[str, ...] = ()) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [*wrapper, *COMMAND],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=before,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["is_well"] else 1)
    return done.returncode, found["findings"]


def test_pairs_are_measured_and_a_back_end_is_chosen() -> None:
    _, findings = run()
    pairs = [each for each in findings if each["check"] == "pair"]
    assert [each["where"] for each in pairs] == ["driver -> worker0", "worker0 -> driver"]
    for each in pairs:
        assert each["level"] == "ok"
        assert "GB/s of a tensor" in each["text"]
    assert [each["level"] for each in findings if each["check"] == "versions"] == ["ok"] * 3
    (backend,) = [each for each in findings if each["check"] == "collectives"]
    assert backend["text"].split(":")[0] in ("gloo", "nccl", "mpi")


def test_200_descriptors_are_named() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    status, findings = run(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)))
    assert status == 1
    named = {each["where"]: each for each in findings if each["check"] == "descriptors"}
    assert named.keys() == {"driver", "worker0"}
    assert "may have 200 descriptors" in named["worker0"]["text"]


def test_64_mib_of_shared_memory_are_named() -> None:
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    if subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False
    ).returncode:
        pytest.skip("no mount of its own can be made here (unshare -rm)")
    wrapper = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh")
    status, findings = run(wrapper=wrapper)
    assert status == 1
    (found,) = [each for each in findings if each["check"] == "/dev/shm"]
    assert "/dev/shm has 64 MiB" in found["text"]
