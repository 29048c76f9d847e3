"""``torchweft doctor`` on this host, and in surroundings that are broken on purpose."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "torchweft", "doctor", "--json"]
LIMIT_S = 90.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def run(
    before: Any = None, wrapper: tuple[str, ...] = (), more: dict[str, str] | None = None
) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [*wrapper, *COMMAND],
        env={**os.environ, **(more or {})},
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


# The numbers of process_vm_readv, which a filter refuses as a container's does.
READING = {"x86_64": 310, "aarch64": 270}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
LOAD, IS_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def forbid_reading() -> None:
    """Has the kernel refuse this process, and its children, to read another's memory."""
    number = READING[platform.machine()]
    steps = [(LOAD, 0, 0, 0), (IS_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    told = ctypes.create_string_buffer(program, len(program))
    for command in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, FILTER, ctypes.addressof(told), 0, 0),
    ):
        if libc.prctl(*command):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter")


@pytest.mark.skipif(platform.machine() not in READING, reason="no number of the system call here")
def test_memory_that_may_not_be_read_is_named() -> None:
    try:
        _, findings = run(forbid_reading)
    except subprocess.SubprocessError as error:
        pytest.skip(f"no filter of system calls can be set here: {error}")
    notes = [each for each in findings if each["check"] == "channel" and "no cma" in each["text"]]
    assert {each["where"] for each in notes} == {"driver -> worker0", "worker0 -> driver"}
    for each in notes:
        assert "ptrace" in each["text"]
        assert "SYS_PTRACE" in each["fix"]


@pytest.mark.thorough  # tests/contract/processes/test_doctor.py names another torch as well.
def test_another_torch_in_a_worker_is_named(tmp_path: Path) -> None:
    # The workers' process is started with -c, the command with -m.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-c' in sys.orig_argv:\n"
        "    import torch\n"
        "    torch.__version__ = '1.13.1'\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, findings = run(more={"PYTHONPATH": path})
    assert status == 1
    (found,) = [each for each in findings if each["level"] == "error"]
    assert found["check"] == "versions"
    assert "1.13 on worker0" in found["text"]
