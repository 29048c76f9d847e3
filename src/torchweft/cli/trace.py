"""``torchweft trace``: what the file of a trace shows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, ObserveError
from torchweft.observe.tracing.graph import graph_of
from torchweft.observe.tracing.reading import load, summary

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
  torchweft trace step.json --context 1
  torchweft trace step.json --context 1 --svg graph.svg"""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft trace``."""
    parser = subcommands.add_parser(
        "trace",
        help="say what a trace shows",
        usage="torchweft trace FILE [--context N [--svg FILE]]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("file", metavar="FILE", help="the file of the trace")
    parser.add_argument(
        "--context", type=int, metavar="N", help="show the graph of this autograd context"
    )
    parser.add_argument("--svg", metavar="FILE", help="write that graph as a picture to this file")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> int:
    """Shows a trace, and returns the exit status."""
    if options.svg and options.context is None:
        raise ConfigurationError("--svg draws the graph of a context: add --context N")
    try:
        trace = load(options.file)
        if options.context is None:
            print(summary(trace))
            return 0
        graph = graph_of(trace, options.context)
        if options.svg:
            Path(options.svg).write_text(graph.svg())
        else:
            print(graph.text())
    except BrokenPipeError:
        raise
    except (ObserveError, OSError) as error:
        print(f"torchweft trace: {error}", file=sys.stderr)
        return FAILURE_STATUS
    return 0
