"""Measures a replay buffer on another worker; see the README beside this file."""

from __future__ import annotations

import sys

from benchmarks.frame import main
from benchmarks.replay.question import QUESTION

if __name__ == "__main__":
    sys.exit(main(QUESTION))
