"""Which trainers are a group, whose first one pulls and pushes for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torchweft.engine.protocol.registration import HOST
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError
from torchweft.rpc import get_worker_info

Aggregate = Literal["host"] | Sequence[Sequence[str]] | None
Groups = tuple[tuple[str, ...], ...]


def groups_of(
    aggregate: Aggregate, trainers: Sequence[str], staleness: int | None, hosts: Mapping[str, str]
) -> Groups:
    """Returns the groups, in the order of their first trainers; none if each is alone.

    Args:
        aggregate: ``"host"``, lists of names, or None.
        trainers: All trainers, in their order.
        staleness: The bound; None for the asynchronous mode.
        hosts: The host of each trainer.

    Raises:
        ConfigurationError: The groups are not of all trainers, or cannot be in this mode.
    """
    if aggregate is None:
        return ()
    if staleness is None:
        raise ConfigurationError(
            "aggregate sums the pushes of a step, and with staleness=None trainers have no common "
            "steps; pass a bound, or leave aggregate out"
        )
    if aggregate == "host":
        by_host: dict[str, list[str]] = {}
        for name in trainers:
            by_host.setdefault(hosts[name], []).append(name)
        found = [tuple(names) for names in by_host.values()]
    elif isinstance(aggregate, str):
        raise ConfigurationError(f"aggregate={aggregate!r}; use 'host', or lists of trainers")
    else:
        found = [tuple(name for name in trainers if name in group) for group in aggregate]
        named = sorted(name for group in aggregate for name in group)
        if named != sorted(trainers) or not all(found):
            raise ConfigurationError(
                f"aggregate has the groups {[list(group) for group in aggregate]}, and the "
                f"trainers are {list(trainers)}; name each trainer in one group"
            )
    if all(len(group) == 1 for group in found):
        return ()
    return tuple(sorted(found, key=lambda group: list(trainers).index(group[0])))


def hosts_of(trainers: Sequence[str]) -> dict[str, str]:
    """Returns the host of each worker, by name.

    Raises:
        UnknownWorker: There is no such worker.
    """
    infos = [get_worker_info(name) for name in trainers]
    hosts = {
        peer.info.name: str(peer.registration.facts.get(HOST, peer.info.name))
        for peer in current().members.present()
    }
    return {info.name: hosts.get(info.name, info.name) for info in infos}
