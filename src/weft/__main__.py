"""Lets ``python -m weft`` do what the command ``weft`` does."""

import sys

from weft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
