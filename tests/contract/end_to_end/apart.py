"""Runs programs in interpreters of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT_S = 150.0
"""For one run; most of it is the start of processes that import torch."""


def run_apart(*arguments: str, folder: Path) -> str:
    """Runs Python in a folder, to its end; returns its standard output."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out
