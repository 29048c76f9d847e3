"""``torchweft trace``: what the file of a trace shows."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torchweft.errors import ObserveError
from torchweft.observe.tracing.reading import graph_of, load, summary

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1

DESCRIPTION = """\
Summarises a trace that torchweft.observe.trace has written: calls and functions by time, bytes by
channel, the slowest calls. With --context, it shows the distributed graph of that autograd context
instead. To see the trace itself, open the file in https://ui.perfetto.dev."""

EXAMPLES = """\
examples:
  torchweft trace step.json
  torchweft trace step.json --context 1"""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft trace``."""
    parser = subcommands.add_parser(
        "trace",
        help="say what a trace shows",
        usage="torchweft trace FILE [--context N]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("file", metavar="FILE", help="the file of the trace")
    parser.add_argument(
        "--context", type=int, metavar="N", help="show the graph of this autograd context"
    )
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Shows a trace, and returns the exit status."""
    try:
        trace = load(options.file)
        is_whole = options.context is None
        print(summary(trace) if is_whole else graph_of(trace, options.context).text())
    except ObserveError as error:
        print(f"torchweft trace: {error}", file=sys.stderr)
        return FAILURE_STATUS
    return 0
