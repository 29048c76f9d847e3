"""Where the workers of a run or cluster serve their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.engine.io.addresses import is_loopback, is_unspecified
from torchweft.scraping import VARIABLE, Address, check_free, check_package

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Scrapes:
    """Where each worker of a run serves its metrics.

    Attributes:
        address: The address, and the first port.
        local_ranks: Each worker's number among those of its host. The worker adds it to its port.
        shift: Added to all ports.
        by_rank: Whether several hosts of the launcher may be one machine, so that the port is
            numbered by rank.
    """

    address: Address
    local_ranks: Mapping[str, int]
    shift: int = 0
    by_rank: bool = False

    def __post_init__(self) -> None:
        for name in self.local_ranks:
            self.of(name)

    def of(self, name: str) -> Address:
        """Returns the address of a worker."""
        ranks = list(self.local_ranks)
        number = ranks.index(name) if self.by_rank else self.local_ranks[name]
        return self.address.plus(self.shift + number)

    def variables(self, name: str) -> dict[str, str]:
        """Returns the variable that tells a worker the port for local rank 0."""
        return {VARIABLE: str(self.of(name).plus(-self.local_ranks[name]))}

    def check_here(self) -> None:
        """Checks that the workers, all on this host, can serve.

        Raises:
            ConfigurationError: The extra is missing, or an address cannot be listened at.
        """
        check_package()
        check_free(map(self.of, self.local_ranks))

    def text(self, hosts: Mapping[str, tuple[str, str]] | None = None) -> str:
        """Returns where to scrape, as text.

        Args:
            hosts: Name and address of each worker's host; None if that is this one.
        """
        shown = [self._text_of(name, hosts) for name in list(self.local_ranks)[:_MOST_SHOWN]]
        left = len(self.local_ranks) - len(shown)
        more = f", and {left} more at the ports that follow" if left else ""
        return f"metrics: {', '.join(shown)}{more}"

    def _text_of(self, name: str, hosts: Mapping[str, tuple[str, str]] | None) -> str:
        address = self.of(name)
        if hosts is None:
            return f"{name} {address.url}"
        host, reached_at = hosts[name]
        if is_loopback(address.host):
            return f"{name} {address.url} on {host}"
        if is_unspecified(address.host):
            address = address._replace(host=reached_at)
        return f"{name} {address.url}"
