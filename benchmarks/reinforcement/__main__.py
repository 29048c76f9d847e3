"""Measures observers and an agent; see the README beside this file."""

from __future__ import annotations

import sys

from benchmarks.frame import main
from benchmarks.reinforcement.question import QUESTION

if __name__ == "__main__":
    sys.exit(main(QUESTION))
