"""Runs a program on Weft: ``python -m torchweft.compat script.py ...``; see ``--help``.

The process becomes the Python that would run the program without Weft, with an environment that
installs the replacement there and in the processes that the program starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchweft.compat.installing import VARIABLE, enable_in_children

PROGRAM = "python -m torchweft.compat"

USAGE_STATUS = 2
"""Python's exit status if it cannot open a script."""

HELP = f"""\
usage: {PROGRAM} SCRIPT [ARGUMENT ...]
       {PROGRAM} -m MODULE [ARGUMENT ...]

Runs a program written for torch.distributed.rpc on Weft: in its process, and in the Python
processes that it starts, torch.distributed.rpc, torch.distributed.autograd,
torch.distributed.optim.DistributedOptimizer and torch.distributed.nn.RemoteModule are Weft's.
Everything else is as with python SCRIPT, or python -m MODULE.

With torchrun, either of
  torchrun --nproc-per-node 2 -m torchweft.compat SCRIPT
  {PROGRAM} -m torch.distributed.run --nproc-per-node 2 SCRIPT
"""


def main(arguments: Sequence[str]) -> None:
    """Becomes the program that the arguments of ``python -m torchweft.compat`` name.

    Raises:
        SystemExit: There is no program to run.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    problem = _problem_with(arguments)
    if problem:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
        sys.exit(USAGE_STATUS)
    enable_in_children()
    # The options of Python stay, as -P and -X; those of this module end with its name.
    options = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, [*_without_module(options), *arguments])


def _problem_with(arguments: Sequence[str]) -> str:
    """Returns why there is no program to run; empty if there is one."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        return f"Python's options -E, -I and -S ignore {VARIABLE}, which installs the replacement"
    if not arguments:
        return "which script, or with -m which module? See --help"
    first = arguments[0]
    if first == "-m":
        return "" if arguments[1:] else "-m needs the name of a module; see --help"
    if first.startswith("-"):
        return f"there is no option {first}; see --help"
    if not os.path.isdir(first):
        try:
            open(first, "rb").close()
        except OSError as error:
            return f"can't open file {first!r}: {error.strerror}"
    return ""


def _without_module(options: Sequence[str]) -> list[str]:
    """Returns the options of Python before ``-m`` and the name of this module."""
    if options[-1].startswith("-m"):
        return list(options[:-1])
    *others, flags = options[:-1]
    kept = flags.removesuffix("m")  # as of -um
    return others if kept == "-" else [*others, kept]


if __name__ == "__main__":
    main(sys.argv[1:])
