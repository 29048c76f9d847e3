"""The launcher on Kubernetes: each worker is a pod of a JobSet.

``torchweft run --on kubernetes`` creates the JobSet and a Secret that belongs to it, shows the
pods' output until the JobSet has ended, and deletes it; Kubernetes then deletes the Secret and the
pods. The cluster needs JobSet, and the image torch, Weft and the script.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchweft import knobs
from torchweft.errors import ConfigurationError, NotSupported
from torchweft.launch.job import Job
from torchweft.launch.kubernetes_manifest import as_yaml, job_set, secret_of
from torchweft.launch.kubernetes_pods import Pods
from torchweft.launch.launchers import Launcher
from torchweft.launch.restarts import GROUP
from torchweft.launch.run import Order

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms
from torchweft.scraping import Address

_SUFFIX_BYTES = 3
_KEY_BYTES = 32


class Kubernetes(Launcher):
    """Starts each worker as a pod.

    Args:
        image: The container image, which has torch, Weft and the script.
        name: Name of the JobSet; by default ``weft-`` and a random number.
        namespace: Where it is created; by default the namespace of the context.
        context: The context of the kubeconfig file; by default the current one.
        cpus: Cores of each worker, as ``"4"`` or ``"500m"``; by default no limit.
        gpus: GPUs of each worker.
        memory: Memory of each worker, as ``"16Gi"``; by default no limit.
        shared_memory: Size of ``/dev/shm`` of each worker.
        secret: Name of a Secret that exists; by default a run makes its own.
        tls: Name of a Secret with ``tls.crt``, ``tls.key`` and ``ca.crt``; by default no TLS.
        user: User and group id of the workers.
        env: Further variables of the workers. Those of this process do not go along.
        python: The interpreter in the image.
        start_timeout_s: Time for all pods to start, in seconds; then the run is given up.
        is_dry: Whether a run only prints the JobSet.

    Raises:
        ConfigurationError: A value is invalid.
    """

    has_own_files = True

    def __init__(
        self,
        image: str,
        *,
        name: str = "",
        namespace: str = "",
        context: str = "",
        cpus: str = "",
        gpus: int = 0,
        memory: str = "",
        shared_memory: str = "1Gi",
        secret: str = "",
        tls: str = "",
        user: int = 1000,
        env: Mapping[str, str] | None = None,
        python: str = "python",
        start_timeout_s: float = 600.0,
        is_dry: bool = False,
    ) -> None:
        if not start_timeout_s > 0:
            raise ConfigurationError(
                f"start_timeout_s is {start_timeout_s}; it must be more than 0 (inf: no limit)"
            )
        self._context = context
        self._secret = secret
        self._start_timeout_s = start_timeout_s
        self._is_dry = is_dry
        self.python = python
        self._fields: dict[str, Any] = {
            "image": image,
            "name": name or f"weft-{secrets.token_hex(_SUFFIX_BYTES)}",
            "namespace": namespace,
            "cpus": cpus,
            "gpus": gpus,
            "memory": memory,
            "shared_memory": shared_memory,
            "secret": secret,
            "tls": tls,
            "user": user,
            "environment": dict(env or {}),
            "python": python,
        }
        Pods(command=(), workers=1, **self._fields)  # checks the values

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the options of ``--on kubernetes``."""
        cls.add_manifest_options(parser)
        parser.add_argument(
            "--context", default="", metavar="NAME", help="the context of the kubeconfig file"
        )
        parser.add_argument(
            "--start-timeout",
            type=float,
            default=600.0,
            metavar="S",
            help="seconds for all pods to start (default: 600)",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="print the JobSet, and create nothing"
        )

    @classmethod
    def add_manifest_options(cls, parser: argparse._ActionsContainer) -> None:
        """Adds the options that describe the pods."""
        for option, metavar, text in (
            ("--image", "IMAGE", "the container image, with torch, torchweft and the script"),
            ("--job-name", "NAME", "name of the run (default: weft- and a random number)"),
            ("--namespace", "NAME", "where it is created (default: that of the context)"),
            ("--cpus", "AMOUNT", "cores of each worker, as 4 or 500m (default: no limit)"),
            ("--memory", "AMOUNT", "memory of each worker, as 16Gi (default: no limit)"),
            ("--secret", "NAME", "Secret with the secret of the group under the key 'secret'"),
            ("--tls", "NAME", "Secret with tls.crt, tls.key and ca.crt (default: no TLS)"),
        ):
            parser.add_argument(option, default="", metavar=metavar, help=text)
        parser.add_argument(
            "--gpus", type=int, default=0, metavar="N", help="GPUs of each worker (default: 0)"
        )
        parser.add_argument(
            "--shared-memory",
            default="1Gi",
            metavar="AMOUNT",
            help="size of /dev/shm (default: 1Gi)",
        )
        parser.add_argument(
            "--user",
            type=int,
            default=1000,
            metavar="ID",
            help="user and group id of the workers (default: 1000)",
        )
        parser.add_argument(
            "--env",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a variable of the workers; may be repeated",
        )
        parser.add_argument(
            "--python", default="python", metavar="PATH", help="the interpreter in the image"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Kubernetes:
        """Returns the launcher that the command line describes."""
        return cls.from_manifest_options(
            options,
            context=options.context,
            start_timeout_s=options.start_timeout,
            is_dry=options.dry_run,
        )

    @classmethod
    def from_manifest_options(cls, options: argparse.Namespace, **more: Any) -> Kubernetes:
        """Returns the launcher that the options about pods describe."""
        names = "image namespace cpus gpus memory shared_memory secret tls user python"
        given = {name: getattr(options, name) for name in names.split()}
        return cls(name=options.job_name, env=_environment(options.env), **given, **more)

    def pods(
        self,
        names: Sequence[str],
        job: Job,
        restarts: int,
        master_port: int,
        metrics: Address | None = None,
    ) -> Pods:
        """Returns the pods of a run.

        Raises:
            ConfigurationError: A value is invalid.
        """
        arguments = job.get("arguments")
        if job["kind"] != "program" or not isinstance(arguments, list):
            raise ConfigurationError(
                "workers on Kubernetes are containers, which are not forked; leave --warm out"
            )
        prefix = _prefix_of(names)
        return Pods(
            command=[self.python, *arguments[1:]],
            workers=len(names),
            names=None if prefix else list(names),
            name_prefix=prefix or "worker",
            restarts=restarts,
            master_port=master_port,
            metrics=metrics,
            **self._fields,
        )

    def run(self, order: Order) -> int:
        """Creates the JobSet and its Secret, and follows it to its end.

        Raises:
            LaunchError: The cluster cannot be reached, refuses, or does not start the pods.
            ConfigurationError: An option does not work here.
        """
        order.restarts.check()
        knobs.check_environment()
        if order.restarts.scope != GROUP:
            raise ConfigurationError(
                "--restart worker is for workers of one machine; here use --restart group"
            )
        pods = self.pods(
            order.names, order.job, order.restarts.limit, order.master_port, order.metrics
        )
        if self._is_dry:
            print(as_yaml([job_set(pods)]), end="")
            return 0
        from torchweft.launch.kubernetes_api import connected
        from torchweft.launch.kubernetes_run import JobSetRun

        if pods.metrics is not None:
            order.console.announce(
                f"torchweft run: metrics: port {pods.metrics.port} of each pod, at /metrics"
            )
        with connected(self._context, pods.namespace) as api:
            run = JobSetRun(api, order.console, pods, self._start_timeout_s)
            return run.to_the_end(lambda owner: self._make_secret(api, pods, owner))

    def _make_secret(self, api: Any, pods: Pods, owner: dict[str, Any]) -> None:
        if not self._secret:
            api.create_secret(secret_of(pods, owner, secrets.token_hex(_KEY_BYTES)))

    def cluster(self, terms: Terms) -> Cluster:
        """Raises NotSupported: pods could not reach this process."""
        raise NotSupported(
            "a cluster around this program needs workers that can reach it, which pods cannot; "
            "use 'torchweft run --on kubernetes', or start the program in a pod"
        )


def _prefix_of(names: Sequence[str]) -> str:
    """Returns the prefix of names that are a prefix and the rank; empty if they are not."""
    prefix = names[0].removesuffix("0")
    is_numbered = all(name == f"{prefix}{rank}" for rank, name in enumerate(names))
    return prefix if is_numbered else ""


def _environment(given: Sequence[str]) -> dict[str, str]:
    environment = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigurationError(f"--env is {text!r}; write it as NAME=VALUE")
        environment[name] = value
    return environment
