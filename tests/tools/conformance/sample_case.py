"""Sample tests for the runner, one for each outcome. pytest does not collect this file."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path


class Sample(unittest.TestCase):
    def test_passes(self) -> None:
        print("a line of output")

    def test_fails(self) -> None:
        raise AssertionError("4 is not 5")

    def test_is_skipped(self) -> None:
        self.skipTest("needs something")

    def test_dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def test_never_ends(self) -> None:
        signal.pause()

    def test_leaves_a_process(self) -> None:
        left = subprocess.Popen(["sleep", "600"])
        left.returncode = 0  # deliberately not waited for
        Path(os.environ["PID_FILE"]).write_text(str(left.pid))

    def test_leaves_a_file(self) -> None:
        tempfile.mkstemp()
