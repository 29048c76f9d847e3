"""The interface of launchers, where they are found by name, and clusters by any of them.

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
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NoReturn

from torchweft import knobs
from torchweft.arguments import check_type, checked_int, did_you_mean, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.ids import check_worker_name
from torchweft.launch.clusters import Cluster
from torchweft.launch.nursery import Nursery
from torchweft.launch.run import Order, run_here
from torchweft.launch.terms import Terms
from torchweft.launch.worker import worker_names

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

GROUP = "torchweft.launchers"
"""The entry point group of other packages' launchers."""

OWN = {
    "local": "torchweft.launch.launchers:Local",
    "ssh": "torchweft.launch.ssh:Ssh",
    "slurm": "torchweft.launch.slurm:Slurm",
    "kubernetes": "torchweft.launch.kubernetes:Kubernetes",
    "ray": "torchweft.launch.ray:Ray",
}


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


class Local(Launcher):
    """Starts workers on this machine."""

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Local:
        """Returns the launcher; it has no options."""
        return cls()

    def run(self, order: Order) -> int:
        """Runs a script in worker processes of this machine; see ``run_here``."""
        return run_here(order)

    def cluster(self, terms: Terms) -> Cluster:
        """Returns a cluster of processes of this machine, which meet without a network."""
        return Cluster(terms)


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
        fix = "pass a name like 'local', or a launcher like torchweft.launch.Ssh('a,b:4')"
        raise wrong_type("on", on, fix)
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


def cluster(
    workers: int | None = None,
    *,
    on: str | Launcher = "local",
    names: Sequence[str] | None = None,
    name: str = "driver",
    rpc_backend_options: RpcBackendOptions | None = None,
    nursery: Nursery | None = None,
    check: bool = True,
    restarts: int = 0,
    seed: int | None = None,
    leave_timeout: float | None = None,
    env: Mapping[str, str] | Mapping[str, Mapping[str, str]] | None = None,
    setup: Callable[[], object] | None = None,
    threads: int | None = None,
    devices: str | Sequence[str] | None = None,
    metrics: str | int | None = None,
) -> Cluster:
    """Makes worker processes that serve the calling program within a ``with`` block.

    The caller joins the group as well, with rank 0; the workers have the ranks from 1. Usable in
    a script, a notebook or at the interactive prompt, any number of times in succession::

        with torchweft.cluster(workers=3) as cluster:
            print(torchweft.rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)))

    Leaving the block shuts the group down gracefully: all workers' outstanding work is finished
    first. If that takes long, a line every 5 s says which worker runs which call. If the block
    raises, the workers are ended at once instead.

    Args:
        workers: How many workers; by default as many as ``names``, or as the launcher says.
        on: Where they start: ``"local"``, this machine; or a launcher like
            ``torchweft.launch.Ssh("a,b:4")``; or its name, with the options of the command line:
            ``"ssh --hosts a,b:4"``.
        names: Their names; by default ``worker0``, ``worker1``, and so on.
        name: The caller's own name.
        rpc_backend_options: Options for every worker and the caller. The init method, the secret
            and the address are replaced: no other user and no other machine can join. Over hosts,
            a new secret is made and handed out.
        nursery: A warm process to fork from; by default the cluster makes and ends its own.
        check: Whether leaving the block raises if a worker ended within it.
        restarts: How often each worker that dies is restarted, within the window and after the
            waits of ``RestartPolicy``. The group is then an open group: calls to a dead worker
            fail, the values that it owned are lost, and ``Cluster.wait_for`` waits for its next
            life.
        seed: Makes the workers' random numbers reproducible: those of Python, NumPy and PyTorch.
            Each worker's own seed is derived from this seed and its name, and is the same in each
            life. Without a seed, the numbers differ by worker and run. The caller's own
            generators are left alone.
        leave_timeout: Seconds that leaving may take; by default ``WEFT_LEAVE_TIMEOUT_S``, 30 s.
            Then stuck workers are named with their stacks and killed, and ``ShutdownError`` is
            raised.
        env: Environment variables of the workers, added to the caller's: for all workers,
            ``{"VARIABLE": "value"}``, or for some, ``{"worker0": {"VARIABLE": "value"}}``. Workers
            are forked from a process that has imported PyTorch. Code that reads variables when it
            is imported sees only those for all workers, and none if ``nursery`` is given.
        setup: A function without arguments that each worker runs before it joins and serves, also
            in each later life. Its time counts towards ``init_timeout``. Its exception becomes
            the cause of the error raised at the start.
        threads: Threads that PyTorch and OpenMP compute with in each worker; by default
            ``OMP_NUM_THREADS``, or this machine's cores divided among the workers.
        devices: A device for each worker, or one for all: ``"cpu"``, ``"cuda:1"``, or ``"cuda"``,
            which distributes this machine's devices among the workers. A CUDA device becomes the
            worker's current device, and ``WEFT_DEVICE`` in its environment names its device.
        metrics: Has the caller and all workers serve their metrics for Prometheus, at
            ``[HOST:]PORT``: the caller at this port, the workers of a host at the ports that
            follow. By default at ``WEFT_METRICS``, if that is set. Without a host, on loopback.
            Needs the extra ``metrics``.

    Each worker finds ``RANK``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``WEFT_WORKER_NAME`` and
    ``WEFT_RESTART_COUNT`` in its environment, as under ``torchweft run``.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ConfigurationError: The value of an argument cannot be used; or a ``WEFT_`` variable is
            unknown, or cannot be read.
    """
    knobs.check_environment()
    launcher = launcher_of(on)
    if workers is None and names is None:
        workers = launcher.count(None)
    checked = _checked_names(workers, names)
    check_type(name, str, "name", "the caller's own name as a text")
    check_worker_name(name)
    if name in checked:
        raise ConfigurationError(
            f"{name!r} names both the caller and a worker; choose another with name="
        )
    terms = Terms(
        checked,
        name,
        rpc_backend_options,
        nursery,
        check,
        restarts,
        seed,
        knobs.LEAVE_TIMEOUT_S.get() if leave_timeout is None else leave_timeout,
        env,
        setup,
        threads,
        devices,
        metrics,
    )
    return launcher.cluster(terms)


def _checked_names(workers: int | None, names: Sequence[str] | None) -> list[str]:
    if workers is None and names is None:
        raise ConfigurationError("say how many workers to start, for instance cluster(workers=2)")
    if workers is not None:
        workers = checked_int("workers", workers)
    if names is not None:
        if not isinstance(names, (list, tuple)):
            raise wrong_type("names", names, "pass a list: names=['ps', 'trainer']")
        for each in names:
            check_type(each, str, "a name of names=", "a str")
    return worker_names(len(names or ()) if workers is None else workers, names)
