"""The interface of launchers, and where they are found by name.

A launcher starts the workers of a run (``torchweft run --on NAME``) or of a cluster
(``torchweft.cluster(on=...)``). Weft's own are files of this package, imported only when used.
Other packages register theirs under the entry point group ``torchweft.launchers``: a subclass of
``Launcher``, or of ``HostsLauncher``, if it can start a command on other hosts.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import NoReturn

from torchweft.arguments import did_you_mean
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch.console import Console
from torchweft.launch.job import Job
from torchweft.launch.local_cluster import Cluster
from torchweft.launch.restarts import RestartPolicy
from torchweft.launch.terms import Terms
from torchweft.scraping import Address

GROUP = "torchweft.launchers"
"""The entry point group of other packages' launchers."""

OWN = {
    "local": "torchweft.launch.local:Local",
    "ssh": "torchweft.launch.ssh:Ssh",
    "slurm": "torchweft.launch.slurm:Slurm",
    "kubernetes": "torchweft.launch.kubernetes:Kubernetes",
    "ray": "torchweft.launch.ray:Ray",
}


@dataclass(frozen=True)
class Order:
    """What ``torchweft run`` was asked for.

    Attributes:
        names: The workers' names, in order of their ranks.
        job: What each of them does, made by ``torchweft.launch.job``.
        console: Where the workers' output goes, and messages about them.
        restarts: The policy when a worker dies.
        master_port: The port at which the workers meet; 0 for a free port.
        is_warm: Whether workers are forked from a process that has imported torch.
        seed: The seed of warm workers, or None.
        metrics: Where the workers serve their metrics, with the first port; None if they do not.
        arguments: The arguments of ``torchweft``, for a launcher that runs the command elsewhere.
    """

    names: Sequence[str]
    job: Job
    console: Console
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    master_port: int = 0
    is_warm: bool = False
    seed: int | None = None
    arguments: Sequence[str] = ()
    metrics: Address | None = None


class Launcher(ABC):
    """Starts workers somewhere.

    Attributes:
        has_own_files: Whether a script is a file of the workers' hosts, which need not be here.
    """

    has_own_files: bool = False

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the launcher's options to the command line; by default none."""
        return

    @classmethod
    @abstractmethod
    def from_options(cls, options: argparse.Namespace) -> Launcher:
        """Returns the launcher that the command line describes.

        Raises:
            ConfigurationError: An option is missing or invalid.
        """

    def count(self, wanted: int | None) -> int | None:
        """Returns how many workers there are; None if neither the user nor the launcher says so.

        Args:
            wanted: How many the user wants; None if that was not said.
        """
        return wanted

    @abstractmethod
    def run(self, order: Order) -> int:
        """Runs a script in its workers until the end, and returns the exit status as shells do.

        Call it from the main thread: it handles signals while it runs.
        """

    @abstractmethod
    def cluster(self, terms: Terms) -> Cluster:
        """Returns the cluster of these terms, which has not started."""


def load(name: str) -> type[Launcher]:
    """Returns the launcher of a name.

    Raises:
        ConfigurationError: There is none; lists those that there are.
    """
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        others = {each.name: each for each in entry_points(group=GROUP)}
        if name not in others:
            known = [*OWN, *others]
            raise ConfigurationError(
                f"there is no launcher {name!r}{did_you_mean(name, known)}; there are "
                f"{', '.join(known)}, and packages may add more (entry points {GROUP!r})"
            )
        try:
            found = others[name].load()
        except Exception as error:
            raise ConfigurationError(
                f"launcher {name!r} of package {others[name].value!r} cannot be imported: {error}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ConfigurationError(
            f"launcher {name!r} is {found!r}; it must be a subclass of torchweft.launch.Launcher"
        )
    return found


def launcher_of(on: str | Launcher) -> Launcher:
    """Returns the launcher that ``on=`` means.

    Args:
        on: A launcher; or its name, with options as on the command line: ``"ssh --hosts a:4,b:4"``.

    Raises:
        ArgumentTypeError: It is neither a text nor a launcher.
        ConfigurationError: There is no such launcher, or its options are wrong.
    """
    if isinstance(on, Launcher):
        return on
    if not isinstance(on, str):
        raise ArgumentTypeError(
            f"on is a {type(on).__name__}, {on!r}; pass a name like 'local', or a launcher like "
            "torchweft.launch.Ssh('a,b:4')"
        )
    try:
        name, *options = shlex.split(on) or [""]
    except ValueError as error:
        raise ConfigurationError(f"on is {on!r}, which cannot be read: {error}") from None
    kind = load(name)
    parser = _OptionsParser(name)
    kind.add_options(parser.add_argument_group())
    return kind.from_options(parser.parse_args(options))


class _OptionsParser(argparse.ArgumentParser):
    """Reads the options in ``on=``."""

    def __init__(self, name: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._name = name

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(
            f"options of launcher {self._name!r}: {message}; 'torchweft run --on {self._name} "
            "--help' lists them"
        )
