"""Lets ``python -m torchweft`` do what the command ``torchweft`` does."""

import sys

from torchweft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
