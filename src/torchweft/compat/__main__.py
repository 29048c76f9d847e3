"""Runs a program on Weft: ``python -m torchweft.compat script.py ...``; see ``--help``."""

import sys

from torchweft.compat.running import main

if __name__ == "__main__":
    main(sys.argv[1:])
