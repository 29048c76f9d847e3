"""``torchweft top``, ``explain``, ``trace``, ``doctor`` and ``probe``: what workers do."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import TYPE_CHECKING

from torchweft import knobs
from torchweft.errors import ConfigurationError, UnknownWorker, WeftError
from torchweft.observe.group import Answers, find, look_around, read_folder
from torchweft.observe.looking import Looker
from torchweft.observe.session import Access
from torchweft.observe.text import show
from torchweft.observe.tracing.reading import graph_of, load, summary
from torchweft.observe.waits import WaitGraph, as_json, explain

if TYPE_CHECKING:
    from torchweft.observe.doctor import Diagnosis

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

FAILURE_STATUS = 1
DEADLOCK_STATUS = 3
"""Status of a command that has found a deadlock."""
_LEAST_INTERVAL_S = 0.1
LOOPBACK = "127.0.0.1"
_INSTALL = "pip install 'torchweft[top]'"

TOP_DESCRIPTION = f"""\
Shows the workers of a running group: calls, times, bytes, references, and who waits for whom. It
joins nothing and changes nothing. GROUP is the name that a group has here, the process id or name
of a worker, or the address of one as tcp:HOST:PORT; it can be left out where one group runs on this
host. A group with a secret needs {knobs.SECRET_FILE.variable}, and one with TLS the variables
{knobs.TLS_CERT.variable}, {knobs.TLS_KEY.variable} and {knobs.TLS_CA.variable}, as its workers
do."""

TOP_EXAMPLES = """\
examples:
  torchweft top
  torchweft top --once
  torchweft top --waits
  torchweft top --worker trainer0 --once
  torchweft top --web
  torchweft top --json | jq '.workers[].in_per_s'"""

EXPLAIN_DESCRIPTION = f"""\
Says where a group is stuck and why, from the files that its workers have written on SIGQUIT or
after a wait of {knobs.DUMP_AFTER_S.variable} seconds."""


TRACE_DESCRIPTION = """\
Summarises a trace that torchweft.observe.trace has written: calls and functions by time, bytes by
channel, the slowest calls. With --context, it shows the distributed graph of that autograd context
instead. To see the trace itself, open the file in https://ui.perfetto.dev."""

TRACE_EXAMPLES = """\
examples:
  torchweft trace step.json
  torchweft trace step.json --context 1"""

PAIRS = 32
"""Pairs of a running group that are measured, unless told otherwise."""

DOCTOR_DESCRIPTION = """\
Examines this host, or with --on others: starts workers, and looks at versions, limits, names,
clocks, the channels between them with their rates, and the back end of collectives that fits. With
--group, it starts nothing and asks the workers of a group that runs, as torchweft top does; each
measured pair of them is busy for some milliseconds. Exit status 0 says that all is well, and 1 that
something is to be changed; the output names the command."""

DOCTOR_EXAMPLES = """\
examples:
  torchweft doctor
  torchweft doctor --on "ssh --hosts a,b"
  torchweft doctor --on "slurm --nodes 2 --workers-per-node 2"
  torchweft doctor --on ray -n 3
  torchweft doctor --group
  torchweft doctor --group tcp:10.0.0.7:40123 --pairs 200"""

PROBE_DESCRIPTION = """\
Says by its exit status whether the workers of this host or container answer: 1 if one that has
joined a group does not. It takes no part in the group. Where no worker has joined yet, or all have
left, the status is 0, or with --joined 1. The first is for a liveness probe, the second for a
readiness probe."""


def add_parsers(subcommands: Subparsers) -> None:
    """Adds the command lines of these subcommands."""
    _add_top(subcommands)
    _add_explain(subcommands)
    _add_trace(subcommands)
    _add_doctor(subcommands)
    _add_probe(subcommands)


def _add_top(subcommands: Subparsers) -> None:
    top = subcommands.add_parser(
        "top",
        help="show what the workers of a running group do",
        usage="torchweft top [GROUP] [--once | --json | --web] [--worker NAME | --waits] ...",
        description=TOP_DESCRIPTION,
        epilog=TOP_EXAMPLES,
    )
    top.add_argument("group", nargs="?", default="", metavar="GROUP", help="which group")
    top.add_argument("--once", action="store_true", help="print once, as text, and end")
    top.add_argument("--json", action="store_true", help="print once, as JSON, and end")
    top.add_argument("--web", action="store_true", help="show it in a browser until Ctrl-C")
    top.add_argument(
        "--host", default=LOOPBACK, help="where --web listens (default: this host alone)"
    )
    top.add_argument("--port", type=int, default=0, help="its port (default: a free one)")
    # The display itself, whose output goes through the server to a browser.
    top.add_argument("--served", action="store_true", help=argparse.SUPPRESS)
    top.add_argument("--worker", metavar="NAME", help="open one worker: calls, stacks, references")
    top.add_argument(
        "--waits", action="store_true", help="say who waits for whom, find deadlocks, and end"
    )
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks"
    )
    top.add_argument(
        "--timeout", type=float, default=2.0, metavar="S", help="seconds to wait for each worker"
    )
    top.set_defaults(execute=run_top)


def _add_explain(subcommands: Subparsers) -> None:
    explaining = subcommands.add_parser(
        "explain",
        help="say why a group is stuck, from what its workers have written",
        usage="torchweft explain FOLDER [--json]",
        description=EXPLAIN_DESCRIPTION,
    )
    explaining.add_argument("folder", metavar="FOLDER", help="the folder that the workers named")
    explaining.add_argument("--json", action="store_true", help="print JSON")
    explaining.set_defaults(execute=run_explain)


def _add_trace(subcommands: Subparsers) -> None:
    parser = subcommands.add_parser(
        "trace",
        help="say what a trace shows",
        usage="torchweft trace FILE [--context N]",
        description=TRACE_DESCRIPTION,
        epilog=TRACE_EXAMPLES,
    )
    parser.add_argument("file", metavar="FILE", help="the file of the trace")
    parser.add_argument(
        "--context", type=int, metavar="N", help="show the graph of this autograd context"
    )
    parser.set_defaults(execute=run_trace)


def _add_doctor(subcommands: Subparsers) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this host would make workers slow, or fail",
        usage="torchweft doctor [--on LAUNCHER] [-n N] | [--group [GROUP]] [--pairs N] [--json]",
        description=DOCTOR_DESCRIPTION,
        epilog=DOCTOR_EXAMPLES,
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
    parser.set_defaults(execute=run_doctor)


def _add_probe(subcommands: Subparsers) -> None:
    parser = subcommands.add_parser(
        "probe",
        help="say whether the workers of this container answer",
        usage="torchweft probe [--joined]",
        description=PROBE_DESCRIPTION,
    )
    parser.add_argument("--joined", action="store_true", help="fail where no worker has joined")
    parser.set_defaults(execute=run_probe)


def run_top(options: argparse.Namespace) -> int:
    """Shows a group, and returns the exit status."""
    for name in ("interval", "timeout"):
        if not _LEAST_INTERVAL_S <= getattr(options, name) < math.inf:
            raise ConfigurationError(
                f"--{name} is {getattr(options, name)}; it is at least {_LEAST_INTERVAL_S} s"
            )
    _check_together(options)
    try:
        group = find(options.group, Access.from_environment())
        if options.worker is not None and options.worker not in group.workers:
            raise UnknownWorker(
                f"the group has no worker {options.worker!r}; it has {', '.join(group.workers)}"
            )
        if options.waits:
            return _show_waits(group.ask(options.timeout), is_json=options.json)
        if options.web:
            return _serve(group.name, options)
        return _show(Looker(group, options.timeout), options)
    except KeyboardInterrupt:
        return 0


def _check_together(options: argparse.Namespace) -> None:
    """Refuses options of which one would have no effect."""
    given = [name for name in ("once", "json", "waits", "web") if getattr(options, name)]
    if options.web and len(given) > 1:
        raise ConfigurationError(f"--{given[0]} prints once, and --web serves a page: omit one")
    if options.waits and options.worker is not None:
        raise ConfigurationError("--waits is of all workers, and --worker of one: omit one")
    if not options.web and (options.host != LOOPBACK or options.port):
        raise ConfigurationError("--host and --port are for the page: add --web")
    if not 0 <= options.port < 1 << 16:
        raise ConfigurationError(
            f"--port is {options.port}; it is a number up to 65535, or 0 for a free one"
        )


def run_explain(options: argparse.Namespace) -> int:
    """Explains the files of a folder, and returns the exit status."""
    answers, warnings = read_folder(options.folder)
    for warning in warnings:
        print(f"torchweft explain: {warning}", file=sys.stderr)
    return _show_waits(answers, is_json=options.json)


def _show_waits(answers: Answers, *, is_json: bool) -> int:
    graph = WaitGraph(answers.reports, answers.silent)
    show([json.dumps(as_json(graph), indent=2) if is_json else explain(graph)])
    return DEADLOCK_STATUS if graph.circles() else 0


def _show(looker: Looker, options: argparse.Namespace) -> int:
    if options.served or (sys.stdout.isatty() and not (options.once or options.json)):
        try:
            from torchweft.observe.screen import TopApp
        except ImportError:
            print(f"torchweft top: for a live display, {_INSTALL}", file=sys.stderr)
        else:
            TopApp(looker, options.interval, options.worker).run()
            return 0
    looker.look(options.worker)
    time.sleep(options.interval)
    seen = looker.look(options.worker)
    if options.json:
        print(json.dumps(looker.as_json(seen), indent=2))
    else:
        show(seen.parts())
    return 0


def _serve(group: str, options: argparse.Namespace) -> int:
    try:
        from torchweft.observe.web import serve
    except ImportError as error:
        raise ConfigurationError(f"--web needs Textual: {_INSTALL}") from error
    arguments = ["top", group, "--served"]
    arguments += [f"--interval={options.interval}", f"--timeout={options.timeout}"]
    if options.worker is not None:
        arguments.append(f"--worker={options.worker}")
    if options.host != LOOPBACK:
        print(
            "torchweft top: the page and its token travel unencrypted; a tunnel to this host's "
            "loopback address is safer (ssh -L)",
            file=sys.stderr,
        )
    serve(arguments, options.host, options.port, lambda address: print(address, flush=True))
    return 0


def run_trace(options: argparse.Namespace) -> int:
    """Shows a trace, and returns the exit status."""
    trace = load(options.file)
    is_whole = options.context is None
    show(summary(trace) if is_whole else [graph_of(trace, options.context).text()])
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Examines the hosts, and returns the exit status."""
    if options.group is not None:
        return _examine_group(options)
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
    return _tell(diagnosis, is_json=options.json)


def _examine_group(options: argparse.Namespace) -> int:
    from torchweft.observe.doctor import examine_group

    if options.on is not None or options.workers is not None:
        raise ConfigurationError(
            "--group examines a group that runs, and --on and -n start workers: omit one of both"
        )
    pairs = PAIRS if options.pairs is None else options.pairs
    if pairs < 0:
        raise ConfigurationError(f"--pairs is {pairs}; it is at least 0")
    group = find(options.group, Access.from_environment())
    return _tell(examine_group(group, most_pairs=pairs), is_json=options.json)


def _tell(diagnosis: Diagnosis, *, is_json: bool) -> int:
    if is_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        show(diagnosis.parts())
    return 0 if diagnosis.is_well else FAILURE_STATUS


def run_probe(options: argparse.Namespace) -> int:
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
