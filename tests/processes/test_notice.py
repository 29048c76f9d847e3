"""``SIGTERM`` of a scheduler as a notice, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 20.0

BODY = """
import importlib, os, signal, sys, time, types
rpc = types.ModuleType("torchweft.rpc")  # not the real package: it would import torch
rpc.__path__ = [sys.argv[1]]
sys.modules["torchweft.rpc"] = rpc
joining = importlib.import_module("torchweft.rpc.joining")
{before}
joining.heed_notice()
print(joining.is_notice_given(), flush=True)
while not joining.is_notice_given():
    time.sleep(0.01)
print(joining.is_notice_given(), flush=True)
signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def start(folder: Path, before: str = "") -> subprocess.Popen[str]:
    import torchweft

    package = Path(torchweft.__file__).parent / "rpc"
    command = [sys.executable, "-c", BODY.format(before=before), str(package)]
    return subprocess.Popen(
        command,
        env={"WEFT_NOTICE_FILE": str(folder / "notice"), "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_first_signal_is_a_notice_and_the_launchers_own_ends(folder: Path) -> None:
    with start(folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        process.terminate()
        assert process.stdout.readline() == "True\n"
        (folder / "ending").touch()
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_handler_of_the_program_stays(folder: Path) -> None:
    with start(folder, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        process.terminate()
        assert process.wait(LIMIT_S) == 9
    assert not (folder / "notice").exists()


def test_processes_that_the_worker_has_forked_end(folder: Path) -> None:
    fork = "os.fork() or (heed(), os.kill(os.getpid(), signal.SIGTERM), os._exit(1))"
    program = f"heed = joining.heed_notice; heed(); {fork}; print(os.wait()[1], flush=True)"
    with start(folder, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        process.kill()
