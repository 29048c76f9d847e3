"""Programs on ``torch.distributed.rpc``: runs them, and keeps what they print with PyTorch.

A program starts several processes that import torch, which takes longest in a comparison of PyTorch
with Weft. So PyTorch's side is recorded, for each version of torch. A record holds as long as the
programs stay as they were; without one, a test runs PyTorch's side itself.
``python -m tests.by_torch`` records it again, and ``make thorough`` compares a run with the record.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "contract" / "programs"
RECORDS = FOLDER / "recorded"

LIMIT_S = 150.0
"""For one run; most of it is the start of processes that import torch."""

END_S = 2.0
"""How soon the processes of a program must be gone after it has ended."""

COMPAT = ("-m", "torchweft.compat")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {"getting_started.py": TORCHRUN}
"""The arguments of Python before programs that do not start their workers themselves."""
PROGRAMS = (
    *"rnn.py parameter_server.py reinforcement.py batch_update.py".split(),
    *"ddp_hybrid.py pipeline.py getting_started.py probes.py".split(),
)

Answers = list[dict[str, Any]]


def run_by_torch(program: str) -> Answers:
    """Runs a program on PyTorch; returns what it prints, and fails if it prints nothing."""
    answers = run(*LAUNCHERS.get(program, ()), program)
    assert answers, f"{program} printed nothing"
    return answers


def run_by_weft(program: str) -> Answers:
    """Runs a program on Weft, unchanged; returns what it prints."""
    return run(*LAUNCHERS.get(program, ()), *COMPAT, program)


def compare(program: str, by_weft: Answers, check: Callable[[Answers, Answers], None]) -> None:
    """Compares answers with those of PyTorch: of the record, or else of a run.

    A record that the answers differ from proves nothing, as processors round differently. So
    PyTorch is run then.

    Args:
        program: The program that gave the answers.
        by_weft: The answers.
        check: Raises ``AssertionError`` unless PyTorch's answers, its first argument, agree with
            its second argument. It changes neither.

    Raises:
        AssertionError: PyTorch's answers are others.
    """
    known = recorded(program)
    if known is not None:
        try:
            return check(known, by_weft)
        except AssertionError as error:
            print(f"{program}: the record is not used: {error}")
    return check(run_by_torch(program), by_weft)


def recorded(program: str) -> Answers | None:
    """Returns PyTorch's answers as they are recorded; None if there is no record that fits."""
    found = read_record()
    if found is None or found["digest"] != digest():
        return None
    answers: Answers | None = found["answers"].get(program)
    return answers


def read_record() -> dict[str, Any] | None:
    """Returns the record of this torch, also if the programs have changed; None without one."""
    try:
        found: dict[str, Any] = json.loads(_record().read_text())
    except FileNotFoundError:
        return None
    return found


def digest() -> str:
    """Returns a digest of all programs: some import others."""
    content = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("probing/*.py")]):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()


def _record() -> Path:
    return RECORDS / f"{torch.__version__.partition('+')[0]}.json"


def instructions() -> str:
    """Returns the name of the processor's instructions; others round differently."""
    return torch.backends.cpu.get_cpu_capability()


def main() -> None:
    """Records PyTorch's side of all programs, for this torch."""
    answers = {program: run_by_torch(program) for program in PROGRAMS}
    _record().parent.mkdir(exist_ok=True)
    record = {"digest": digest(), "instructions": instructions(), "answers": answers}
    _record().write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"written: {_record()}")


def run(*arguments: str, folder: Path = FOLDER) -> Answers:
    """Runs Python with the arguments; returns the JSON lines that it prints, sorted.

    The processes form a session of their own: none may be left when the first has ended.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "MASTER_PORT": str(find_port()), "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
        _wait_until_alone(process.pid)
    finally:
        _kill_session(process)
    return [json.loads(line) for line in sorted(out.splitlines())]


def find_port() -> int:
    """Returns a port that is free at the moment."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_until_alone(session: int) -> None:
    deadline_s = time.monotonic() + END_S
    while left := _processes_of(session):
        assert time.monotonic() < deadline_s, f"processes that the program left: {left}"
        time.sleep(0.02)


def _processes_of(session: int) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number, *_ = (
                (folder / "stat").read_text().rpartition(")")[2].split(maxsplit=4)
            )
            if int(number) == session and state not in "ZX":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _kill_session(process: subprocess.Popen[str]) -> None:
    with process:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
