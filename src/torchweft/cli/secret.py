"""``torchweft secret``: makes the secret that the workers of a group share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchweft import knobs
from torchweft.secret import write_new

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = f"""\
Makes a file with a new random secret, which only this user can read. Copy it to every host and
set {knobs.SECRET_FILE.variable} to its path: then only workers that have it can join the group."""


def add_parser(subcommands: Subparsers) -> argparse.ArgumentParser:
    """Adds the command line of ``torchweft secret``."""
    parser = subcommands.add_parser(
        "secret",
        help="make the secret that the workers of a group share",
        usage="torchweft secret new FILE",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["new"], help="what to do")
    parser.add_argument("file", help="path of the file; it must not be there yet")
    return parser


def execute(options: argparse.Namespace) -> int:
    """Makes the file and returns the exit status."""
    write_new(options.file)
    print(f"a new secret is in {options.file}; on every host: {_setting(options.file)}")
    return 0


def _setting(path: str) -> str:
    return f"{knobs.SECRET_FILE.variable}={path}"
