"""Measures this tree beside an earlier commit; see the README beside this file."""

from __future__ import annotations

import sys

from benchmarks.gate.gate import main

if __name__ == "__main__":
    sys.exit(main())
