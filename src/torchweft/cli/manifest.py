"""``torchweft manifest``: a run on Kubernetes as YAML."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchweft.cli.run import (
    add_metrics,
    add_program,
    add_workers,
    job_of,
    metrics_of,
    names_of,
)

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Prints the JobSet of a run on Kubernetes. The options are those of torchweft run --on kubernetes.
Each worker is a pod that runs the script of the image. The Secret with the secret of the group is
not printed; the head of the output shows the commands that make it."""

EXAMPLES = """\
example:
  torchweft manifest --image registry.example/train:1 -n 8 --gpus 1 train.py | kubectl apply -f -"""


def add_parser(subcommands: Subparsers, arguments: Sequence[str] = ()) -> None:
    """Adds the command line of ``torchweft manifest``.

    Args:
        subcommands: Where it is added.
        arguments: The arguments of ``torchweft``; only those of this command need its options.
    """
    parser = subcommands.add_parser(
        "manifest",
        help="print a run on Kubernetes as YAML",
        usage="torchweft manifest --image IMAGE -n N [options] (SCRIPT | -m MODULE) [ARGUMENTS]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    if arguments[:1] == ["manifest"]:
        _add_options(parser)
    parser.set_defaults(execute=run, warm=False)


def _add_options(parser: argparse.ArgumentParser) -> None:
    # Other commands must not import it.
    from torchweft.launch.kubernetes_manifest import add_options

    add_workers(parser, port="29500")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often the group is started again when a worker fails (default: not at all)",
    )
    add_options(parser)
    add_metrics(parser)
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the JobSet, and returns the exit status."""
    from torchweft.launch.kubernetes_manifest import Pods, as_yaml, fields_in, job_set

    pods = Pods(**fields_in(options)).with_program(
        names_of(options, options.workers),
        job_of(options, is_here=False),
        restarts=options.restarts,
        master_port=options.master_port,
        metrics=metrics_of(options),
    )
    within = f" --namespace {pods.namespace}" if pods.namespace else ""
    print(
        f"# The secret of the group, in case there is none yet:\n"
        f"#   torchweft secret new FILE\n"
        f"#   kubectl create secret generic {pods.secret_name}{within} --from-file=secret=FILE\n"
        f"{as_yaml(job_set(pods))}",
        end="",
    )
    return 0
