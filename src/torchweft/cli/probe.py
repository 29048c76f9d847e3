"""``torchweft probe``: whether the workers of this container answer, for Kubernetes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError
from torchweft.observe.group import look_around
from torchweft.observe.session import Access

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1

DESCRIPTION = """\
Says by its exit status whether the workers of this host or container answer: 1 if one that has
joined a group does not. It takes no part in the group. Where no worker has joined yet, or all have
left, the status is 0, or with --joined 1. The first is for a liveness probe, the second for a
readiness probe."""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft probe``."""
    parser = subcommands.add_parser(
        "probe",
        help="say whether the workers of this container answer",
        usage="torchweft probe [--joined]",
        description=DESCRIPTION,
    )
    parser.add_argument("--joined", action="store_true", help="fail where no worker has joined")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Asks the workers, and returns the exit status."""
    try:
        access = Access.from_environment()
    except ConfigurationError as error:  # As before the worker: it will say so, and end.
        print(f"torchweft probe: {error}", file=sys.stderr)
        return FAILURE_STATUS if options.joined else 0
    count, silent = look_around(access)
    for text in silent:
        print(f"torchweft probe: a worker {text}", file=sys.stderr)
    if silent or (options.joined and not count):
        return FAILURE_STATUS
    return 0
