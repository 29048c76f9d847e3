"""``torchweft.cluster``: checks what it is told, and makes the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchweft import knobs
from torchweft.errors import ConfigurationError
from torchweft.ids import check_worker_name
from torchweft.launch.local_cluster import Cluster
from torchweft.launch.nursery import Nursery
from torchweft.launch.restarting_cluster import RestartingCluster
from torchweft.launch.terms import Terms, check_type
from torchweft.launch.worker import worker_names

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions


def cluster(
    workers: int | None = None,
    *,
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
) -> Cluster:
    """Makes worker processes that serve the calling program within a ``with`` block.

    The caller joins the group as well, with rank 0; the workers have the ranks from 1. Usable in
    a script, a notebook or at the interactive prompt, any number of times, one after the other::

        with torchweft.cluster(workers=3) as cluster:
            print(torchweft.rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)))

    Leaving the block shuts the group down gracefully: everybody's outstanding work is finished
    first. While that takes long, a line each 5 s says which worker runs what. When the block
    raises, the workers are ended at once instead.

    Args:
        workers: How many workers; by default as many as ``names``.
        names: Their names; by default ``worker0``, ``worker1``, and so on.
        name: The caller's own name.
        rpc_backend_options: Options for every worker and the caller; the init method is replaced,
            and so are secret and address: nobody of another user or machine is let in.
        nursery: A warm process to fork from; by default one is made, and ended with the cluster.
        check: Whether leaving the block raises if a worker ended within it.
        restarts: How often each worker that dies is started again, within the time and after the
            waits of ``RestartPolicy``. The group is an open one then: calls to a worker that died
            fail, what it owned is lost, and ``Cluster.wait_for`` waits for its next life.
        seed: Makes the random numbers of the workers reproducible: those of Python, NumPy and
            PyTorch. Each worker has a seed of its own, made of this one and its name, and the
            same one in each life. Without, every worker and every run has other numbers. The
            caller's own generators are left alone.
        leave_timeout: Seconds that leaving may take; by default ``WEFT_LEAVE_TIMEOUT_S``, 30 s.
            Then what is stuck is named with its stack and killed, and ``ShutdownError`` raised.
        env: Environment variables of the workers beside those of the caller: of all,
            ``{"VARIABLE": "value"}``, or of some, ``{"worker0": {"VARIABLE": "value"}}``. Workers
            are forked from a process that has imported PyTorch; what reads a variable when it is
            imported sees those of all workers only, and none where ``nursery`` is given.
        setup: A function without arguments that each worker runs before it joins and serves, also
            in each later life. It is part of ``init_timeout``; what it raises is the cause of the
            error that this raises at the start.
        threads: Threads that PyTorch and OpenMP compute with in each worker; by default
            ``OMP_NUM_THREADS``, or the cores of this machine shared out among the workers.
        devices: A device for each worker, or one for all: ``"cpu"``, ``"cuda:1"``, or ``"cuda"``,
            which shares out the devices of this machine. A CUDA device is made the worker's current
            one, and ``WEFT_DEVICE`` in its environment names its device.

    Each worker finds ``RANK``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``WEFT_WORKER_NAME`` and
    ``WEFT_RESTART_COUNT`` in its environment, as under ``torchweft run``.

    Raises:
        ArgumentTypeError: An argument is of a type that cannot work.
        ConfigurationError: The names, or the number of workers or restarts, cannot be used; or a
            ``WEFT_`` variable is unknown, or cannot be read.
    """
    knobs.check_environment()
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
    )
    return RestartingCluster(terms) if restarts else Cluster(terms)


def _checked_names(workers: int | None, names: Sequence[str] | None) -> list[str]:
    if workers is None and names is None:
        raise ConfigurationError("say how many workers to start, for instance cluster(workers=2)")
    if workers is not None:
        check_type(workers, int, "workers", "how many there are: workers=2")
    if names is not None:
        check_type(names, (list, tuple), "names", "a list: names=['ps', 'trainer']")
        for each in names:
            check_type(each, str, "a name of names=", "a str")
    return worker_names(len(names or ()) if workers is None else workers, names)
