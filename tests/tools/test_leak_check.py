"""Runs pytest on tests that leave something behind, with the hooks of ``tests/conftest.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SAMPLE = """
import os, subprocess, threading
import pytest

def leave_open():
    os.open(os.devnull, os.O_RDONLY)

@pytest.fixture(scope="session")
def child():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield
        process.kill()

@pytest.fixture(scope="module", params=[1, 2])
def wide():
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(descriptor)

@pytest.fixture
def narrow():
    leave_open()

def test_clean(): pass
def test_descriptor(): leave_open()
def test_clean_after_a_leak(): pass
def test_wider_fixture(child): pass
def test_module(wide): pass
def test_beside_a_wider_fixture(wide): leave_open()
def test_fixture(narrow): pass

def test_failure():
    leave_open()
    raise ValueError

def test_thread():
    threading.Thread(target=threading.Event().wait, name="stays", daemon=True).start()

@pytest.mark.keeps("descriptors")
def test_kept(): leave_open()

def test_clean_in_the_end(): pass
"""

LEAKING = {
    "descriptor": "descriptors: N -> /dev/null",
    "beside_a_wider_fixture[1]": "descriptors: N -> /dev/null",
    "beside_a_wider_fixture[2]": "descriptors: N -> /dev/null",
    "fixture": "descriptors: N -> /dev/null",
    "failure": "descriptors: N -> /dev/null",
    "thread": "threads: stays",
}


def test_what_a_test_leaves_behind_is_told_and_that_of_wider_fixtures_is_not(
    tmp_path: Path,
) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:warnings", "-c"]
    done = subprocess.run(
        [*command, os.devnull, "-o", "markers=keeps", f"--rootdir={tmp_path}", str(sample)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.findall(
        r"ERROR at teardown of test_(\S+) _*\nleft behind:\n  (.*)\n(?!  )", done.stdout
    )
    assert {test: re.sub(r"\d+ ->", "N ->", what) for test, what in found} == LEAKING, done.stdout
    assert "1 failed, 12 passed, 6 errors" in done.stdout
