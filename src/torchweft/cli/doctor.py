"""``torchweft doctor``: examines hosts with workers that it starts, or a group that runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, ObserveError, ProtocolError, WeftError
from torchweft.observe.text import show

if TYPE_CHECKING:
    from torchweft.observe.doctor import Diagnosis

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1
PAIRS = 32
"""Pairs of a running group that are measured, unless told otherwise."""

DESCRIPTION = """\
Examines this host, or with --on others: starts workers, and looks at versions, limits, names,
clocks, the channels between them with their rates, and the back end of collectives that fits. With
--group, it starts nothing and asks the workers of a group that runs, as torchweft top does; each
measured pair of them is busy for some milliseconds. Exit status 0 says that all is well, and 1 that
something is to be changed; the output names the command."""

EXAMPLES = """\
examples:
  torchweft doctor
  torchweft doctor --on "ssh --hosts a,b"
  torchweft doctor --on "slurm --nodes 2 --workers-per-node 2"
  torchweft doctor --on ray -n 3
  torchweft doctor --group
  torchweft doctor --group tcp:10.0.0.7:40123 --pairs 200"""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft doctor``."""
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this host would make workers slow, or fail",
        usage="torchweft doctor [--on LAUNCHER] [-n N] | [--group [GROUP]] [--pairs N] [--json]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--on",
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
    parser.add_argument(
        "--group",
        nargs="?",
        const="",
        metavar="GROUP",
        help="examine a running group, named as for torchweft top (default: the only one here)",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"how many pairs of workers of the group to measure (default: {PAIRS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Examines the hosts, and returns the exit status."""
    if options.group is not None:
        return _attach(options)
    if options.pairs is not None:
        raise ConfigurationError("--pairs is for a running group: add --group")
    from torchweft.launch import cluster
    from torchweft.observe.doctor import examine
    from torchweft.rpc import RpcBackendOptions

    launcher = options.on or "local"
    workers = 1 if options.workers is None and launcher == "local" else options.workers
    # Different versions of torch are to be told beside everything else.
    lenient = RpcBackendOptions(other_versions="warn")
    try:
        with cluster(workers, on=launcher, rpc_backend_options=lenient):
            diagnosis = examine()
    except ConfigurationError:
        raise
    except WeftError as error:
        print(f"torchweft doctor: no group can be started: {error}", file=sys.stderr)
        return FAILURE_STATUS
    return _show(diagnosis, is_json=options.json)


def _attach(options: argparse.Namespace) -> int:
    from torchweft.observe.doctor import examine_group
    from torchweft.observe.group import find
    from torchweft.observe.session import Access

    if options.on is not None or options.workers is not None:
        raise ConfigurationError(
            "--group examines a group that runs, and --on and -n start workers: omit one of both"
        )
    pairs = PAIRS if options.pairs is None else options.pairs
    if pairs < 0:
        raise ConfigurationError(f"--pairs is {pairs}; it is at least 0")
    try:
        diagnosis = examine_group(find(options.group, Access.from_environment()), most_pairs=pairs)
    except (ObserveError, ProtocolError) as error:
        print(f"torchweft doctor: {error}", file=sys.stderr)
        return FAILURE_STATUS
    return _show(diagnosis, is_json=options.json)


def _show(diagnosis: Diagnosis, *, is_json: bool) -> int:
    if is_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        show(diagnosis.parts())
    return 0 if diagnosis.is_well else FAILURE_STATUS
