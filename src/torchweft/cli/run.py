"""``torchweft run``: one script in several worker processes, on this machine or on others."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchweft import knobs
from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.console import command_console
from torchweft.launch.job import Job, module_job, program_job, script_job
from torchweft.launch.launchers import OWN, load
from torchweft.launch.restarts import GROUP, SCOPES, RestartPolicy
from torchweft.launch.run import Order
from torchweft.launch.worker import worker_names
from torchweft.scraping import Address, address_in

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

LOCAL = "local"
INTERRUPTED_STATUS = 130

DESCRIPTION = """\
Starts workers, each running the same script: on this machine or, with --on, on others. A script
joins its group with torchweft.init_rpc(), which finds RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
and WEFT_WORKER_NAME in the environment. Output lines are marked with the worker's name. When a
worker fails, the others are stopped, and its last lines are printed at the end.

With --restarts, workers that die are started again; WEFT_RESTART_COUNT tells them how often that
was. Of a group (the default), all are: when one has died, the others are ended, and the whole
group begins anew, at another port. With --restart worker, only the one that died is, and the
others work on. That is for open groups, which one can join later: the workers find no WORLD_SIZE
and no port, but meet at the launcher, so any of them may die."""

EXAMPLES = """\
examples:
  torchweft run -n 4 train.py --epochs 3
  torchweft run --names ps,trainer0,trainer1 train.py
  torchweft run -n 2 -m package.train
  torchweft run -n 4 --restarts 3 train.py
  torchweft run -n 4 --metrics 9400 train.py
  torchweft run -n 4 --restarts 10 --restart worker serve.py
  torchweft run --on ssh --hosts a:4,b:4 train.py
  torchweft run --on slurm --nodes 2 --workers-per-node 4 train.py
  torchweft run --on ray -n 8 --num-cpus 2 --strategy SPREAD train.py
  torchweft run --on kubernetes --image registry.example/train:1 -n 8 train.py"""


def add_parser(subcommands: Subparsers, arguments: Sequence[str] = ()) -> None:
    """Adds the command line of ``torchweft run``.

    Args:
        subcommands: Where it is added.
        arguments: The arguments of ``torchweft``; ``--on`` among them decides which options exist.
    """
    parser = subcommands.add_parser(
        "run",
        help="run a script in several worker processes",
        usage="torchweft run [-n N] [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    _add_options(parser)
    if (on := _launcher_named(arguments)) != LOCAL:
        load(on).add_options(parser.add_argument_group(f"options of --on {on}"))
    parser.set_defaults(execute=execute, arguments=arguments)


def _launcher_named(arguments: Sequence[str]) -> str:
    """Returns the launcher that the command line names, before its options are known."""
    if arguments[:1] != ["run"]:
        return LOCAL
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_options(parser)
    try:
        found: str = parser.parse_known_args(list(arguments[1:]))[0].on
    except argparse.ArgumentError:  # the complete parser reports it
        return LOCAL
    return found


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        default=LOCAL,
        metavar="LAUNCHER",
        help=f"where to start them: {', '.join(OWN)}, or a package's launcher (default: {LOCAL}); "
        "before the launcher's own options, which --on LAUNCHER --help shows",
    )
    add_workers(parser, port="a free one")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="fork the workers from a process that has imported torch; they start sooner, but "
        "what a script changes in the environment before it imports torch comes too late",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="with --warm: make the workers' random numbers reproducible; each worker has a seed "
        "made of N and its name (default: other numbers in each worker and run)",
    )
    _add_restarts(parser)
    add_metrics(parser)
    add_program(parser)


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Adds the option that has workers serve their metrics."""
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="each worker serves its metrics for Prometheus, at PORT + its local rank (on Ray: its "
        "rank), on loopback unless HOST is another address; needs the extra 'metrics'",
    )


def metrics_of(options: argparse.Namespace) -> Address | None:
    """Returns where workers serve their metrics; None if they do not.

    Raises:
        ConfigurationError: The option means no address.
    """
    return None if options.metrics is None else address_in(options.metrics, "--metrics")


def add_workers(parser: argparse.ArgumentParser, port: str) -> None:
    """Adds the options that say how many workers there are, their names, and where they meet."""
    parser.add_argument("-n", "--workers", type=int, metavar="N", help="how many workers to start")
    parser.add_argument("--names", help="the workers' names, separated by commas, by rank")
    parser.add_argument(
        "--name-prefix", default="worker", help="names are this and the rank (default: worker)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help=f"the port at which the workers meet (default: {port})",
    )


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the script or module and its arguments."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="how often what died is started again, within the window (default: not at all)",
    )
    parser.add_argument(
        "--restart",
        choices=SCOPES,
        help=f"what is started again when a worker dies (default: {GROUP})",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        metavar="S",
        help="seconds before the first restart, at most; each further one in a row waits twice "
        f"as long, up to {knobs.RESTART_BACKOFF_LIMIT_S.default:g} "
        f"(default: {knobs.RESTART_BACKOFF_S.default:g})",
    )
    parser.add_argument(
        "--restart-window",
        type=float,
        metavar="S",
        help="seconds within which restarts count "
        f"(default: {knobs.RESTART_WINDOW_S.default:g}; inf: for good)",
    )


def execute(options: argparse.Namespace) -> int:
    """Runs the workers and returns the exit status."""
    launcher = load(options.on).from_options(options)
    names = names_of(options, launcher.count(options.workers))
    if not 0 <= options.master_port < 1 << 16:
        raise ConfigurationError(
            f"--master-port is {options.master_port}; a port is a number from 1 to 65535"
        )
    if options.seed is not None and not options.warm:
        raise ConfigurationError(
            "--seed is for workers that are forked: add --warm, or have the script seed itself, "
            "for instance by torch.manual_seed(1000 * SEED + int(os.environ['RANK']))"
        )
    order = Order(
        names,
        job_of(options, is_here=not launcher.has_own_files),
        command_console(),
        _restarts(options),
        options.master_port,
        options.warm,
        options.seed,
        options.arguments,
        metrics_of(options),
    )
    try:
        return launcher.run(order)
    except LaunchError as error:
        order.console.announce(f"torchweft run: {error}")
        return 1
    except KeyboardInterrupt:  # while hosts were being reached
        return INTERRUPTED_STATUS


def _restarts(options: argparse.Namespace) -> RestartPolicy:
    given = {
        "scope": options.restart,
        "backoff_s": options.backoff,
        "window_s": options.restart_window,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if options.restarts is None and chosen:
        raise ConfigurationError("say how many restarts there may be, for instance: --restarts 3")
    return RestartPolicy(limit=options.restarts or 0, **chosen)


def names_of(options: argparse.Namespace, workers: int | None) -> list[str]:
    """Returns the names that the options of the workers describe.

    Raises:
        ConfigurationError: They cannot be used, or do not say how many workers there are.
    """
    names = None if options.names is None else options.names.split(",")
    if workers is None and names is None:
        raise ConfigurationError(
            f"say how many workers to start, for instance: torchweft {options.subcommand} -n 2 "
            "train.py; options go before the script"
        )
    count = len(names) if options.workers is None and names is not None else workers
    assert count is not None
    return worker_names(count, names, options.name_prefix)


def job_of(options: argparse.Namespace, *, is_here: bool = True) -> Job:
    """Returns the job that the script or module of a command line describes.

    Args:
        options: The options of the command line.
        is_here: Whether the script must be a file of this host.

    Raises:
        ConfigurationError: There is no script.
    """
    given: list[str] = options.program
    if given[:1] == ["--"]:  # The end of the options, as in other commands.
        given = given[1:]
    if not given:
        missing, example = "script", "train.py"
        if options.is_module:
            missing, example = "module after -m", "-m package.train"
        raise ConfigurationError(
            f"there is no {missing}; write: torchweft {options.subcommand} -n 2 {example}"
        )
    program, *arguments = given
    if is_here and not options.is_module:
        _check_script(program)
    if options.warm:
        return (module_job if options.is_module else script_job)(program, arguments)
    mode = ["-m"] if options.is_module else []
    # Flags of this interpreter are for this host.
    flags = subprocess._args_from_interpreter_flags() if is_here else []  # type: ignore[attr-defined]
    return program_job([sys.executable, *flags, *mode, program, *arguments])


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        raise ConfigurationError(f"{path!r} is a directory; name the script in it")
    if not os.path.exists(path):
        hint = "; options go before the script" if path.startswith("-") else ""
        raise ConfigurationError(
            f"there is no script {path!r} in {os.getcwd()}{hint or '; check the path'}"
        )
