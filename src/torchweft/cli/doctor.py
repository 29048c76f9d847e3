"""``torchweft doctor``: examines this host with two workers that it starts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, WeftError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1

DESCRIPTION = """\
Examines this host, or with --on others: starts workers, and looks at versions, limits, names,
clocks, the channels between them with their rates, and the back end of collectives that fits. Exit
status 0 says that all is well, and 1 that something is to be changed; the output names the command.
A group that runs is examined from one of its workers, by torchweft.observe.doctor.examine()."""

EXAMPLES = """\
examples:
  torchweft doctor
  torchweft doctor --on "ssh --hosts a,b"
  torchweft doctor --on "slurm --nodes 2 --workers-per-node 2"
  torchweft doctor --on ray -n 3"""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft doctor``."""
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this host would make workers slow, or fail",
        usage="torchweft doctor [--on LAUNCHER] [-n N] [--json]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--on",
        default="local",
        metavar="LAUNCHER",
        help="where to start the workers, with the options of the launcher (default: local)",
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="N",
        help="how many workers, beside this process (default: 1, or as the launcher says)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Examines the hosts, and returns the exit status."""
    from torchweft.launch import cluster
    from torchweft.observe.doctor import examine
    from torchweft.rpc import RpcBackendOptions

    workers = 1 if options.workers is None and options.on == "local" else options.workers
    # Different versions of torch are to be told beside everything else.
    lenient = RpcBackendOptions(other_versions="warn")
    try:
        with cluster(workers, on=options.on, rpc_backend_options=lenient):
            diagnosis = examine()
    except ConfigurationError:
        raise
    except WeftError as error:
        print(f"torchweft doctor: no group can be started: {error}", file=sys.stderr)
        return FAILURE_STATUS
    print(json.dumps(diagnosis.as_json(), indent=2) if options.json else diagnosis)
    return 0 if diagnosis.is_well else FAILURE_STATUS
