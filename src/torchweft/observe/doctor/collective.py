"""Says which back end of collectives fits the workers; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.errors import ConfigurationError
from torchweft.hybrid import choose_backend
from torchweft.observe.doctor.facts import HostFacts
from torchweft.observe.doctor.findings import Finding, Level


def check_backend(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields what ``backend="auto"`` would take."""
    try:
        choice = choose_backend([each.devices for each in facts])
    except ConfigurationError as error:
        yield Finding(Level.NOTE, "collectives", "all workers", str(error))
        return
    yield Finding(Level.GOOD, "collectives", "all workers", str(choice))
