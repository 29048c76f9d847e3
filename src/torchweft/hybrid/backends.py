"""Chooses the back end of a process group by devices and networks; pure.

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

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchweft.errors import ConfigurationError
from torchweft.rpc.devices import Devices as Facts


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
