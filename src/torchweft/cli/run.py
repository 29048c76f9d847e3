"""``torchweft run``: one script in several worker processes on this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.launch.console import command_console
from torchweft.launch.job import Job, module_job, program_job, script_job
from torchweft.launch.restarts import GROUP, SCOPES, RestartPolicy
from torchweft.launch.run import run_workers
from torchweft.launch.worker import worker_names

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts workers on this machine, each running the same script. A script joins its group with
torchweft.init_rpc(), which finds RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and WEFT_WORKER_NAME in
the environment. Output lines are marked with the worker's name. When a worker fails, the others
are stopped, and its last lines are printed at the end.

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
  torchweft run -n 4 --restarts 10 --restart worker serve.py"""


def add_parser(subcommands: Subparsers) -> None:
    """Adds the command line of ``torchweft run``."""
    parser = subcommands.add_parser(
        "run",
        help="run a script in several worker processes on this machine",
        usage="torchweft run [-n N] [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        help="the port at which the workers meet (default: a free one)",
    )
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
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(execute=execute)


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
    names = _names(options)
    if not 0 <= options.master_port < 1 << 16:
        raise ConfigurationError(
            f"--master-port is {options.master_port}; a port is a number from 1 to 65535"
        )
    if options.seed is not None and not options.warm:
        raise ConfigurationError(
            "--seed is for workers that are forked: add --warm, or have the script seed itself, "
            "for instance by torch.manual_seed(1000 * SEED + int(os.environ['RANK']))"
        )
    return run_workers(
        names,
        _job(options),
        console=command_console(),
        master_port=options.master_port,
        is_warm=options.warm,
        restarts=_restarts(options),
        seed=options.seed,
    )


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


def _names(options: argparse.Namespace) -> list[str]:
    names = None if options.names is None else options.names.split(",")
    if options.workers is None and names is None:
        raise ConfigurationError(
            "say how many workers to start, for instance: torchweft run -n 2 ..."
        )
    count = len(names) if options.workers is None and names is not None else options.workers
    return worker_names(count, names, options.name_prefix)


def _job(options: argparse.Namespace) -> Job:
    if not options.program:
        missing = "module after -m" if options.is_module else "script"
        raise ConfigurationError(f"there is no {missing}; write: torchweft run -n 2 train.py")
    program, *arguments = options.program
    if not options.is_module:
        _check_script(program)
    if options.warm:
        return (module_job if options.is_module else script_job)(program, arguments)
    mode = ["-m"] if options.is_module else []
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return program_job([sys.executable, *flags, *mode, program, *arguments])


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        raise ConfigurationError(f"{path!r} is a directory; name the script in it")
    if not os.path.exists(path):
        hint = "; options go before the script" if path.startswith("-") else ""
        raise ConfigurationError(
            f"there is no script {path!r} in {os.getcwd()}{hint or '; check the path'}"
        )
