"""Says which back end of collectives fits the workers; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.errors import ConfigurationError
from torchweft.hybrid import Facts, choose_backend
from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import HostFacts


def check_backend(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields what ``backend="auto"`` would take."""
    try:
        choice = choose_backend([_devices(each) for each in facts])
    except ConfigurationError as error:
        yield Finding(Level.NOTE, "collectives", "all workers", str(error))
        return
    yield Finding(Level.GOOD, "collectives", "all workers", str(choice))


def _devices(facts: HostFacts) -> Facts:
    return Facts(
        facts.host,
        facts.device,
        frozenset(facts.backends),
        facts.has_infiniband,
        facts.has_ip_over_infiniband,
    )
