"""Programs in the style of PyTorch's tutorials give the same results with PyTorch and with Weft.

The programs are in ``tests/programs``; none of them uses Weft explicitly. Losses must be equal to
the last bit wherever the program determines the order of additions.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"

LIMIT_S = 150.0
"""For one run; most of it is the start of processes that import torch."""

END_S = 2.0
"""How soon the processes of a program must be gone after it has ended."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMPAT = ["-m", "torchweft.compat"]

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 20)


def run(*arguments: str, folder: Path = PROGRAMS) -> list[dict[str, Any]]:
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
        wait_until_alone(process.pid)
    finally:
        kill_session(process)
    return [json.loads(line) for line in sorted(out.splitlines())]


def find_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_until_alone(session: int) -> None:
    deadline_s = time.monotonic() + END_S
    while left := processes_of(session):
        assert time.monotonic() < deadline_s, f"processes that the program left: {left}"
        time.sleep(0.02)


def processes_of(session: int) -> list[str]:
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


def kill_session(process: subprocess.Popen[str]) -> None:
    with process:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run_both(program: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    by_torch, by_weft = run(program), run(*COMPAT, program)
    assert by_torch, "the program printed nothing"
    return by_torch, by_weft


@pytest.mark.parametrize("program", ["rnn", "parameter_server", "reinforcement", "batch_update"])
def test_a_tutorials_program_computes_the_same(program: str) -> None:
    by_torch, by_weft = run_both(f"{program}.py")
    assert by_weft == by_torch


MODULES = "rpc|autograd|optim|nn"
IMPORTS = (
    (rf"^import torch\.distributed\.({MODULES}) as", r"import torchweft.\1 as"),
    (rf"^from torch\.distributed\.({MODULES}) import", r"from torchweft.\1 import"),
)
"""The changes of imports that ``docs/migration.md`` describes."""


def write_with_our_imports(program: str, folder: Path) -> None:
    text, count = (PROGRAMS / program).read_text(), 0
    for stock, ours in IMPORTS:
        text, changed = re.subn(stock, ours, text, flags=re.MULTILINE)
        count += changed
    assert count
    assert not re.search(rf"torch\.distributed\.({MODULES})", text)
    (folder / program).write_text(text)


def test_a_hybrid_program_computes_the_same_also_with_other_imports(tmp_path: Path) -> None:
    by_torch, by_compat = run_both("ddp_hybrid.py")
    assert by_compat == by_torch
    write_with_our_imports("ddp_hybrid.py", tmp_path)
    assert run("ddp_hybrid.py", folder=tmp_path) == by_torch


def test_a_pipeline_computes_the_same() -> None:
    by_torch, by_weft = run_both("pipeline.py")
    for expected, found in zip(by_torch, by_weft, strict=True):
        if expected["split_size"] == 2:
            # Nothing determines the order in which gradients of eight micro-batches are added.
            expected["losses"] = pytest.approx(expected["losses"], rel=1e-6)
        assert found == expected


def test_torchruns_workers_find_one_another() -> None:
    by_torch = run(*TORCHRUN, "getting_started.py")
    by_weft = run(*TORCHRUN, *COMPAT, "getting_started.py")
    assert by_torch[0]["losses"]
    assert by_weft == by_torch


REMADE = [
    *"AssertionError AttributeError IndexError KeyError OSError StopIteration".split(),
    "TwoPartError",
]


def _both(kind: str) -> list[str]:
    """Returns the base classes of an error that is both of a kind and a ``RuntimeError``."""
    return ["BaseException", "Exception", "RuntimeError", kind, kind, "object"]


BY_DESIGN: dict[str, tuple[object, object]] = {
    # An error keeps its kind if it can be rebuilt, and is a RuntimeError, as PyTorch's are.
    "errors_that_are_of_their_own_kind_and_runtime_errors": (
        {**{kind: [False, True] for kind in REMADE}, "OwnError": [False, False]},
        {kind: [True, True] for kind in [*REMADE, "OwnError"]},
    ),
    # Weft adds it as a note of the error (Python 3.10: as its cause).
    "remote_traceback_in_the_text_of_an_error": ([True, True], [False, False]),
    "lambdas": ("refused", 2),
    # PyTorch returns the error itself as the result.
    "an_error_set_in_a_future_of_an_asynchronous_function": (
        {"returned": "ValueError"},
        {"kinds": _both("ValueError"), "says": []},
    ),
    # PyTorch selects an overload as TorchScript does; Weft calls the function.
    "operator_that_gets_what_it_cannot_take": (
        {"kinds": ["BaseException", "Exception", "RuntimeError", "object"], "says": []},
        {"kinds": _both("TypeError"), "says": []},
    ),
    "a_reference_is_an_rref": (False, True),
}
"""Probes with two right answers: PyTorch's, and Weft's."""


def test_probes_are_answered_the_same() -> None:
    by_torch, by_weft = (
        {answer["probe"]: answer["result"] for answer in answers}
        for answers in run_both("probes.py")
    )
    assert by_torch.keys() == by_weft.keys()
    assert len(by_torch) > 40
    different = {
        name: lines
        for name, expected in by_torch.items()
        if (lines := compare(expected, by_weft[name], name))
    }
    unknown = different.keys() - BY_DESIGN.keys()
    assert not unknown, "\n".join(line for name in sorted(unknown) for line in different[name])
    assert {name: (by_torch[name], by_weft[name]) for name in BY_DESIGN} == BY_DESIGN


def compare(expected: Any, found: Any, place: str) -> list[str]:
    """Returns where two answers differ; an error may be of more kinds than the expected one."""
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (e, f) in pairs for line in compare(e, f, f"{place}[{index}]")]
    if is_error(expected) and is_error(found):
        missing = set(expected["kinds"]) - set(found["kinds"])
        if not missing and expected.get("says") == found.get("says"):
            return []
    return [] if found == expected else [f"{place}: PyTorch {expected}, Weft {found}"]


def is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and "kinds" in answer
