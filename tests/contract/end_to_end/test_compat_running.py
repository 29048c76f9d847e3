"""Compares ``python -m torchweft.compat`` with ``python``, on programs without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LOOK = """
import os, sys
main = sys.modules["__main__"]
print(sorted(name for name in vars(main) if name.startswith("__")), globals() is vars(main))
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path, __builtins__.__name__, sys.excepthook is sys.__excepthook__)
print("torch" in sys.modules)  # imported when the program does it, if ever

def fail():
    raise ValueError("boom")

action = sys.argv[1:]
if action == ["raise"]:
    fail()
if action == ["chain"]:
    try:
        fail()
    except ValueError as error:
        raise KeyError("then") from error
if action == ["text"]:
    sys.exit("a text")
if action == ["status"]:
    sys.exit(7)
if action == ["interrupt"]:
    raise KeyboardInterrupt
if action == ["hook"]:
    sys.excepthook = lambda kind, error, traceback: print(kind, traceback.tb_frame.f_code.co_name)
    fail()
if action == ["later"]:
    import atexit, pickle
    atexit.register(lambda: print(pickle.loads(pickle.dumps(fail)) is fail))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with one program in all the forms that Python runs."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("look.py", "package/module.py", "package/__main__.py", "container/__main__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(LOOK)
    (folder / "package" / "__init__.py").touch()
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nprint(ascii('\xe4'))\n")
    (folder / "wrong.py").write_text("x = (\n")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "link.py").symlink_to(folder / "look.py")
    with zipfile.ZipFile(folder / "container.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "look.py",
        "look.py a -m b --help",
        "./package/../look.py raise",
        "look.py chain",
        "look.py text",
        "look.py status",
        "look.py interrupt",
        "look.py hook",
        "look.py later",
        "elsewhere/link.py",
        "latin.py",
        "wrong.py",
        "container a",
        "container.zip",
        "-m package.module raise",
        "-m package a -m",
        "-m package.nothing",
    ],
)
def test_a_program_sees_what_python_shows_it(folder: Path, command: str) -> None:
    expected = run(folder, *command.split())
    assert run(folder, "-m", "torchweft.compat", *command.split()) == expected


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is new in 3.11")
def test_a_path_that_is_to_stay_safe_does(folder: Path) -> None:
    expected = run(folder, "-P", "look.py")
    assert run(folder, "-P", "-m", "torchweft.compat", "look.py") == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("nothing.py", "can't open file 'nothing.py': No such file or directory"),
        ("elsewhere/nothing.py", "can't open file 'elsewhere/nothing.py': No such file"),
        ("", "which script, or with -m which module? See --help"),
        ("-m", "-m needs the name of a module; see --help"),
        ("--fast look.py", "there is no option --fast; see --help"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(folder: Path, command: str, message: str) -> None:
    status, out, err = run(folder, "-m", "torchweft.compat", *command.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"python -m torchweft.compat: {message}")
    assert err.count("\n") == 1


def test_help_is_given(folder: Path) -> None:
    status, out, err = run(folder, "-m", "torchweft.compat", "--help")
    assert (status, err) == (0, "")
    assert "usage: python -m torchweft.compat SCRIPT" in out
