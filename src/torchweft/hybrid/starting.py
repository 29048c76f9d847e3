"""Makes the process group of trainers, who are workers already, and chooses its back end."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchweft.arguments import UNSET_TIMEOUT, limit_of
from torchweft.engine.io import addresses
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError
from torchweft.hybrid.backends import Choice, choose_backend
from torchweft.rpc import all_gather, get_worker_info
from torchweft.rpc.devices import find_devices

_WAIT_S = 300.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK_INTERFACE = "lo"


def init_process_group(
    trainers: Sequence[str],
    *,
    backend: str = "auto",
    device: str | None = None,
    timeout: float = UNSET_TIMEOUT,
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
        store = TCPStore(_own_host(is_one_host), 0, len(names), True, wait_for_workers=False)
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


def _own_host(is_one_host: bool) -> str:
    """Returns an address of this host that all trainers reach."""
    if not is_one_host:
        for text in current().me.registration.addresses:
            address = addresses.parse(text)
            if isinstance(address, addresses.TcpAddress) and addresses.is_far(address):
                return address.host
    return addresses.LOOPBACK


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
