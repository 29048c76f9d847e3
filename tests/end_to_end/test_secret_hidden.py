"""The secret appears in no log, command line, traceback, environment or pickle."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "telling.py"
SECRET = "Wh4t-n0b0dy-sh4ll-s33-anywhere"
SHORT = "t00-sh0rt"
LIMIT_S = 150.0
TOLD = (
    "has a secret: True",
    "<Secret, not shown>",
    "cannot be pickled",
    "== object",
    "local variables at line",
    "weft\\x00run",
    "Thread 0x",
    "== all: Traceback",
    "== remote: Traceback",
)


def run(environment: dict[str, str]) -> tuple[int, str]:
    """Runs two workers that print all that they can; returns the exit code and the output."""
    done = subprocess.run(
        [sys.executable, "-m", "torchweft", "run", "-n", "2", str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        timeout=LIMIT_S,
    )
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def assert_hidden(secret: str, told: str) -> None:
    whole = secret.encode()
    ways = [secret, whole.hex(), base64.b64encode(whole).decode().rstrip("="), repr(whole)[2:-1]]
    ways += [secret[:8], secret[-8:]]
    assert not [way for way in ways if way in told]


@pytest.fixture(params=["WEFT_SECRET", "WEFT_SECRET_FILE"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    if request.param == "WEFT_SECRET":
        return {"WEFT_SECRET": SECRET}
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return {"WEFT_SECRET_FILE": str(path)}


def test_programs_that_tell_everything_do_not_tell_the_secret(environment: dict[str, str]) -> None:
    code, told = run(environment)
    assert not code, told[-3000:]
    for what in TOLD:
        assert what in told, what
    assert told.count("== all told") == 2
    assert_hidden(SECRET, told)


def test_a_wrong_secret_is_not_told_either() -> None:
    _, told = run({"WEFT_SECRET": SHORT})
    assert "== end: Traceback" in told
    assert f"the secret has {len(SHORT)} bytes" in told
    assert_hidden(SHORT, told)


def test_two_different_secrets_are_told_apart_without_telling_them(tmp_path: Path) -> None:
    _, told = run({"WEFT_SECRET": SECRET, "WEFT_SECRET_FILE": str(tmp_path / "none")})
    assert "both WEFT_SECRET_FILE and WEFT_SECRET are set" in told
    assert_hidden(SECRET, told)


def test_what_shows_is_noticed() -> None:
    for shown in (SECRET, SECRET.encode().hex(), f"... {SECRET[:8]}"):
        with pytest.raises(AssertionError):
            assert_hidden(SECRET, f"before {shown} after")
