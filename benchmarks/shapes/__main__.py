"""Measures calls of many shapes; see the README beside this file."""

from __future__ import annotations

import sys

from benchmarks.frame import main
from benchmarks.shapes.question import QUESTION

if __name__ == "__main__":
    sys.exit(main(QUESTION))
