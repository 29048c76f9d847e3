"""``torchweft doctor``: examines this host with two workers that it starts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from torchweft.errors import WeftError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1

DESCRIPTION = """\
Examines this host: starts two workers, and looks at versions, limits, names, clocks, the channels
between them with their rates, and the back end of collectives that fits. Exit status 0 says that
all is well, and 1 that something is to be changed; the output names the command. A group that runs
is examined from one of its workers, by torchweft.observe.doctor.examine()."""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft doctor``."""
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this host would make workers slow, or fail",
        usage="torchweft doctor [--json]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Examines this host, and returns the exit status."""
    from torchweft.launch import cluster
    from torchweft.observe.doctor import examine

    try:
        with cluster(workers=1):
            diagnosis = examine()
    except WeftError as error:
        print(f"torchweft doctor: no group can be started here: {error}", file=sys.stderr)
        return FAILURE_STATUS
    print(json.dumps(diagnosis.as_json(), indent=2) if options.json else diagnosis)
    return 0 if diagnosis.is_well else FAILURE_STATUS
