"""Reads the command line of ``torchweft`` and hands it to a subcommand, like ``run`` or ``top``.

A subcommand is a function that adds its part of the command line. The default ``execute`` of that
part is a function that does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn

from torchweft import knobs, standard_streams
from torchweft.cli import manifest, run, top
from torchweft.errors import ConfigurationError, ObserveError, ProtocolError, UnknownWorker
from torchweft.secret import write_new

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

USAGE_STATUS = 2

SECRET_DESCRIPTION = f"""\
Makes a file with a new random secret, which only this user can read. Copy it to every host and
set {knobs.SECRET_FILE.variable} to its path: then only workers that have it can join the group."""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"{self.prog}: {message}; see {self.prog} --help\n")


class _SubcommandParser(_Parser):
    """Shows descriptions as they are written, and knows no abbreviations of options."""

    def __init__(self, **given: Any) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(**given, formatter_class=shape, allow_abbrev=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command ``torchweft`` with ``arguments``, by default those of the process.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    standard_streams.open_missing()
    try:
        options, unknown = _build_parser(given).parse_known_args(given)
    except ConfigurationError as error:
        print(f"torchweft run: {error}", file=sys.stderr)
        return USAGE_STATUS
    if unknown:
        command = f"torchweft {options.subcommand}"
        print(
            f"{command}: unrecognized arguments: {' '.join(unknown)}; see {command} --help",
            file=sys.stderr,
        )
        return USAGE_STATUS
    try:
        status: int = options.execute(options)
        sys.stdout.flush()
    except ConfigurationError as error:
        print(f"torchweft {options.subcommand}: {error}", file=sys.stderr)
        return USAGE_STATUS
    except (ObserveError, ProtocolError, UnknownWorker) as error:
        print(f"torchweft {options.subcommand}: {error}", file=sys.stderr)
        return top.FAILURE_STATUS
    except BrokenPipeError:  # As of a program whose output goes to ``head``.
        standard_streams.drop_output()
        return 0
    except KeyboardInterrupt:
        return run.INTERRUPTED_STATUS
    return status


def _build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="torchweft", description="Distributed training for PyTorch by remote calls."
    )
    parser.add_argument("--version", action="version", version=f"torchweft {_version()}")
    subcommands: Subparsers = parser.add_subparsers(
        dest="subcommand", metavar="COMMAND", required=True, parser_class=_SubcommandParser
    )
    run.add_parser(subcommands, arguments)
    top.add_parsers(subcommands)
    manifest.add_parser(subcommands, arguments)
    _add_secret_parser(subcommands)
    return parser


def _version() -> str:
    try:
        return version("torchweft")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


# The subcommand ``secret``


def _add_secret_parser(subcommands: Subparsers) -> None:
    parser = subcommands.add_parser(
        "secret",
        help="make the secret that the workers of a group share",
        usage="torchweft secret new FILE",
        description=SECRET_DESCRIPTION,
    )
    parser.add_argument("action", choices=["new"], help="what to do")
    parser.add_argument("file", help="path of the file; it must not be there yet")
    parser.set_defaults(execute=_make_secret)


def _make_secret(options: argparse.Namespace) -> int:
    write_new(options.file)
    setting = f"{knobs.SECRET_FILE.variable}={options.file}"
    print(f"a new secret is in {options.file}; on every host: {setting}")
    return 0
