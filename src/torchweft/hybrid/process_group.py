"""The process group of trainers, who are workers already, and its back end.

====== ============= ==============================================================
device network       back end
====== ============= ==============================================================
GPU    InfiniBand    NCCL: alone in using InfiniBand with GPUDirect
GPU    Ethernet      NCCL; gloo if NCCL makes trouble
CPU    InfiniBand    gloo if IP runs over InfiniBand, else MPI
CPU    Ethernet      gloo, unless there is a reason of the program's own for MPI
====== ============= ==============================================================

A back end that this PyTorch does not have is left out, and NCCL too where two ranks would share a
GPU, which it refuses.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchweft.arguments import UNSET_RPC_TIMEOUT, limit_of
from torchweft.errors import ConfigurationError
from torchweft.extending import find_devices
from torchweft.reports import Devices as Facts
from torchweft.rpc import all_gather, get_worker_info


@dataclass(frozen=True)
class Choice:
    """A back end, and why.

    Attributes:
        backend: ``"gloo"``, ``"nccl"`` or ``"mpi"``.
        reason: Why it was chosen.
        passed_over: Back ends that would have been better, with the reason against each.
    """

    backend: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Returns the choice in one line."""
        over = "".join(f"; not {name}: {reason}" for name, reason in self.passed_over)
        return f"{self.backend}: {self.reason}{over}"


def choose_backend(facts: Sequence[Facts]) -> Choice:
    """Returns the back end of a group; pure.

    Args:
        facts: Those of each worker of the group, in the order of ranks.

    Raises:
        ConfigurationError: There is no worker, some have a GPU and some not, or they have no back
            end in common that serves their device.
    """
    if not facts:
        raise ConfigurationError("there is no worker to choose a back end for")
    on_gpu = [each.device != "cpu" for each in facts]
    if any(on_gpu) != all(on_gpu):
        odd = facts[on_gpu.index(not on_gpu[0])]
        raise ConfigurationError(
            f"rank 0 trains on {facts[0].device}, and rank {facts.index(odd)} on {odd.device}; "
            "have all train on GPUs, or all on CPUs"
        )
    passed_over: list[tuple[str, str]] = []
    for backend, reason in _in_order(facts, is_gpu=on_gpu[0]):
        against = _against(backend, facts)
        if not against:
            return Choice(backend, reason, tuple(passed_over))
        passed_over.append((backend, against))
    listed = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise ConfigurationError(f"no back end fits all workers: {listed}")


def _in_order(facts: Sequence[Facts], *, is_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yields back ends with the reason for each, the best first."""
    has_infiniband = all(each.has_infiniband for each in facts)
    is_one_host = len({each.host for each in facts}) == 1
    if is_gpu:
        where = "InfiniBand, with GPUDirect" if has_infiniband else "Ethernet or within a host"
        yield "nccl", f"GPUs over {where}"
        yield "gloo", "GPUs without NCCL: broadcast and all-reduce through host memory"
        return
    if has_infiniband and not is_one_host:
        if all(each.has_ip_over_infiniband for each in facts):
            yield "gloo", "CPUs over InfiniBand, on which IP runs"
        else:
            yield "mpi", "CPUs over InfiniBand without IP, which gloo needs"
            yield "gloo", "CPUs, over the slower network that has IP"
    else:
        yield "gloo", "CPUs of one host" if is_one_host else "CPUs over Ethernet"
    yield "mpi", "CPUs without gloo"


def _against(backend: str, facts: Sequence[Facts]) -> str:
    """Returns why a back end cannot be used; empty if it can."""
    for rank, each in enumerate(facts):
        if backend not in each.backends:
            return f"PyTorch of rank {rank} on {each.host} is built without it"
    if backend == "nccl":
        count = Counter((each.host, each.device) for each in facts)
        (host, device), ranks = count.most_common(1)[0]
        if ranks > 1:
            return f"{ranks} ranks share {device} of {host}"
    return ""


# The group

_WAIT_S = 300.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE = "lo"
_LOOPBACK = "127.0.0.1"


def init_process_group(
    trainers: Sequence[str],
    *,
    backend: str = "auto",
    device: str | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Choice:
    """Makes the default process group of ``torch.distributed`` for some workers. Blocks.

    Each of the trainers calls it. They are found by their names as workers: no address, port, rank
    or size is to be told. ``torch.distributed.destroy_process_group`` ends the group.

    Args:
        trainers: Names of the workers, in the order of their ranks.
        backend: ``"gloo"``, ``"nccl"`` or ``"mpi"``; ``"auto"`` for the one that fits the devices
            and networks of all trainers, see ``choose_backend``.
        device: The device that this worker trains on, such as ``"cuda:0"``; by default the GPU that
            is current, if there is one, else the CPU.
        timeout: Seconds to wait for the other trainers, also in each collective later; by default
            300. 0 is not possible.

    Returns:
        The back end, and why it was chosen.

    Raises:
        ConfigurationError: This worker is no trainer, or no back end fits.
        CallTimeout: Another trainer has not called it in time; names it.
        WorkerLost: A trainer is lost.
    """
    limit_s = limit_of(timeout, _WAIT_S)
    names = list(trainers)
    me = get_worker_info().name
    if me not in names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"worker {me!r} makes a process group of {names}; name each trainer once, this one too"
        )
    facts = find_devices(device)
    known = all_gather(facts, names, timeout=limit_s)
    everybody = [known[name] for name in names]
    choice = Choice(backend, "requested by the program")
    if backend == "auto":
        choice = choose_backend(everybody)
    is_one_host = len({each.host for each in everybody}) == 1
    store, place = None, ("", 0)
    if me == names[0]:
        store = TCPStore(
            _LOOPBACK if is_one_host else facts.address, 0, len(names), True, wait_for_workers=False
        )
        place = store.host, store.port
    host, port = all_gather(place, names, timeout=limit_s)[names[0]]
    limit = datetime.timedelta(seconds=limit_s)
    if store is None:
        store = TCPStore(host, port, len(names), False, limit)
    with _interface(_LOOPBACK_INTERFACE if is_one_host else ""):
        distributed.init_process_group(
            choice.backend, timeout=limit, world_size=len(names), rank=names.index(me), store=store
        )
    return choice


@contextmanager
def _interface(name: str) -> Iterator[None]:
    """Has gloo use an interface, unless the environment names one.

    It would use that of the host's name, which on some hosts leads nowhere.
    """
    if not name or _GLOO_INTERFACE in os.environ or not Path("/sys/class/net", name).exists():
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]
