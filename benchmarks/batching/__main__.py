"""Measures batched calls; see the README beside this file."""

from __future__ import annotations

import sys

from benchmarks.batching.question import QUESTION
from benchmarks.frame import main

if __name__ == "__main__":
    sys.exit(main(QUESTION))
