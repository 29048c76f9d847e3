"""Runs a program on Weft: ``python -m weft.compat script.py ...``; see ``--help``."""

import sys

from weft.compat.running import main

if __name__ == "__main__":
    main(sys.argv[1:])
