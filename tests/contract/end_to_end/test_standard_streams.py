"""Standard streams that are closed, missing, replaced or broken, in the program and the tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, io, os, sys
import torchweft as weft
from torchweft import rpc
from torchweft.launch import Nursery

class Refusing:
    def __getattr__(self, name):
        raise RuntimeError(f"this stream has no {name}")

def talk(text):
    print(text)
    print(text, file=sys.stderr)
    os.system(f"echo {text}")  # It uses the descriptors themselves.
    return text

def harm(what):
    exec(what, {"os": os, "sys": sys})

def close(*descriptors):
    for each in descriptors:
        os.close(each)

def without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.close(writing)

def shut(name):
    stream = io.StringIO()
    stream.close()
    setattr(sys, name, stream)

WAYS = {
    "None": lambda: (setattr(sys, "stdout", None), setattr(sys, "stderr", None)),
    "shut object": lambda: (shut("stdout"), shut("stderr")),
    "object that refuses": lambda: setattr(sys, "stdout", Refusing()),
    "only ASCII": lambda: setattr(
        sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    ),
    "close output": lambda: close(1),
    "nobody reads": without_reader,
    "close all": lambda: close(0, 1, 2),
}
HARMS = (
    "None",
    "sys.stdout = sys.stderr = None",
    "sys.stdout.close(); sys.stderr.close()",
    "os.close(0); os.close(1); os.close(2)",
)

if __name__ == "__main__":
    log = open(sys.argv[1], "w")
    first, second = sys.stdout, sys.stderr
    nursery = Nursery()
    for way, prepare in WAYS.items():
        if sys.argv[2:] not in ([], [way]):
            continue
        sys.stdout, sys.stderr = first, second
        prepare()
        try:
            warm = None if "close" in way else nursery
            with weft.cluster(workers=len(HARMS), nursery=warm):
                names = [f"worker{each}" for each in range(len(HARMS))]
                said = [rpc.rpc_sync(each, talk, args=("caf\\u00e9",)) for each in names]
                for each, what in zip(names, HARMS):
                    rpc.rpc_sync(each, harm, args=(what,))
                answers = [rpc.rpc_sync(each, max, args=(1, 2)) for each in names]
            assert set(said) == {"caf\\u00e9"} and set(answers) == {2}, (said, answers)
            log.write(f"{way}: right\\n")
        except BaseException as error:
            log.write(f"{way}: {type(error).__name__}: {error}\\n")
        log.flush()
    os._exit(0)
"""

WAYS = (
    "None",
    "shut object",
    "object that refuses",
    "only ASCII",
    "close output",
    "nobody reads",
    "close all",
)

LAUNCHED = """
import sys
from torchweft import rpc
rpc.init_rpc()
print("from", rpc.get_worker_info().name)
print("errors", file=sys.stderr)
with open(f"{sys.argv[1]}.{rpc.get_worker_info().id}", "w") as file:
    file.write(str(rpc.rpc_sync("worker0", max, args=(1, 2))))
rpc.shutdown()
"""


def closing(*descriptors: int) -> Callable[[], None]:
    def prepare() -> None:
        for each in descriptors:
            os.close(each)

    return prepare


def run(*command: str | Path, closed: tuple[int, ...] = ()) -> int:
    done = subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=closing(*closed),
        timeout=120,
        check=False,
    )
    return done.returncode


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_a_cluster_serves_whatever_became_of_the_streams(program: Path, tmp_path: Path) -> None:
    assert run(program, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().splitlines() == [f"{each}: right" for each in WAYS]


def test_a_cluster_of_a_program_that_began_without_streams(program: Path, tmp_path: Path) -> None:
    assert run(program, tmp_path / "log", WAYS[0], closed=(0, 1, 2)) == 0
    assert (tmp_path / "log").read_text().splitlines() == [f"{WAYS[0]}: right"]


@pytest.mark.parametrize(("warm", "closed"), [((), (1,)), (("--warm",), (0, 1, 2))])
def test_a_launcher_without_streams_runs_its_workers(
    tmp_path: Path, warm: tuple[str, ...], closed: tuple[int, ...]
) -> None:
    (tmp_path / "launched.py").write_text(LAUNCHED)
    arguments = (*warm, tmp_path / "launched.py", tmp_path / "found")
    assert run("-m", "torchweft", "run", "-n", "2", *arguments, closed=closed) == 0
    assert [(tmp_path / f"found.{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize(
    ("closed", "arguments", "status"),
    [
        ((0, 1, 2), ("secret", "new", "FILE"), 0),
        ((0, 1, 2), ("explain", "nowhere"), 2),
    ],
)
def test_a_tool_without_streams_ends_with_its_status(
    tmp_path: Path, closed: tuple[int, ...], arguments: tuple[str, ...], status: int
) -> None:
    given = [str(tmp_path / "secret") if each == "FILE" else each for each in arguments]
    assert run("-m", "torchweft", *given, closed=closed) == status


def test_a_tool_whose_output_nobody_reads_says_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchweft", "secret", "new", str(tmp_path / "secret")]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
