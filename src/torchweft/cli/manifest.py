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
Prints the objects of a run on Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer with its
TrainingRuntime. The options are those of torchweft run --on kubernetes. Each worker is a pod that
runs the script of the image. The Secret with the secret of the group is not printed; the head of
the output shows the commands that make it."""

EXAMPLES = """\
examples:
  torchweft manifest --image registry.example/train:1 -n 8 --gpus 1 train.py | kubectl apply -f -
  torchweft manifest --kind trainjob --image registry.example/train:1 -n 8 -m package.train"""


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
    from torchweft.launch.kubernetes import Kubernetes
    from torchweft.launch.kubernetes_manifest import JOB_SET, KINDS

    parser.add_argument(
        "--kind", choices=KINDS, default=JOB_SET, help=f"which objects (default: {JOB_SET})"
    )
    add_workers(parser, port="29500")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often the group is started again when a worker fails (default: not at all)",
    )
    Kubernetes.add_manifest_options(parser)
    add_metrics(parser)
    add_program(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the objects, and returns the exit status."""
    from torchweft.launch.kubernetes import Kubernetes
    from torchweft.launch.kubernetes_manifest import as_yaml, documents

    launcher = Kubernetes.from_manifest_options(options)
    names = names_of(options, options.workers)
    job = job_of(options, is_here=False)
    metrics = metrics_of(options)
    pods = launcher.pods(names, job, options.restarts, options.master_port, metrics)
    text = as_yaml(documents(options.kind, pods))
    within = f" --namespace {pods.namespace}" if pods.namespace else ""
    print(
        f"# The secret of the group, in case there is none yet:\n"
        f"#   torchweft secret new FILE\n"
        f"#   kubectl create secret generic {pods.secret_name}{within} --from-file=secret=FILE\n"
        f"{text}",
        end="",
    )
    return 0
