"""Runs every benchmark; ``python -m benchmarks.calls --help`` lists the options of one."""

from __future__ import annotations

import sys

from benchmarks.calls.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
