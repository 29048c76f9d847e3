"""Reads the command line of ``torchweft`` and hands it to a subcommand.

A subcommand is a module with two functions: ``add_parser`` adds its part of the command line,
``execute`` does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NoReturn

from torchweft.cli import run, secret
from torchweft.errors import ConfigurationError

SUBCOMMANDS: tuple[ModuleType, ...] = (run, secret)

USAGE_STATUS = 2


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command ``torchweft`` with ``arguments``, by default those of the process.

    Returns:
        The exit status.
    """
    options = _build_parser().parse_args(arguments)
    try:
        status: int = options.execute(options)
    except ConfigurationError as error:
        print(f"torchweft {options.subcommand}: {error}", file=sys.stderr)
        return USAGE_STATUS
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchweft", description="Distributed training for PyTorch by remote calls."
    )
    parser.add_argument("--version", action="version", version=f"torchweft {_version()}")
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subcommands).set_defaults(execute=module.execute)
    return parser


def _version() -> str:
    try:
        return version("torchweft")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
