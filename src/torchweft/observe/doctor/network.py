"""Checks names, packets and clocks; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import HostFacts, PairFacts

MOST_CLOCK_S = 1.0


def check_names(facts: HostFacts) -> Iterator[Finding]:
    """Yields whether the name of a host leads to an address."""
    if facts.is_resolved and not facts.addresses:
        text = "its own name does not resolve, and gloo asks for it"
        fix = f"add {facts.host} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        yield Finding(Level.NOTE, "names", facts.host, text, fix)


def check_mtu(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields whether interfaces of one name have the same size of packets on all hosts."""
    found: dict[str, dict[int, str]] = {}
    for each in facts:
        for interface, size in each.mtu:
            found.setdefault(interface, {}).setdefault(size, each.host)
    for interface, sizes in found.items():
        if len(sizes) > 1:
            told = ", ".join(f"{size} on {host}" for size, host in sizes.items())
            fix = f"ip link set {interface} mtu {min(sizes)}, on all hosts"
            yield Finding(Level.ERROR, "mtu", interface, f"packets differ: {told}", fix)


def check_clocks(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yields by how much the clocks of all hosts differ, unless that is an error."""
    between = [each for each in pairs if each.latency_s and not each.is_one_host]
    if not between:
        return
    worst = max(between, key=lambda each: abs(each.clock_s))
    if abs(worst.clock_s) <= MOST_CLOCK_S:
        text = (
            f"clocks differ by {abs(worst.clock_s) * 1e3:.1f} ms at most, as those of "
            f"{worst.caller} and {worst.callee}, measured to {worst.clock_error_s * 1e3:.1f} ms"
        )
        yield Finding(Level.GOOD, "clock", "all hosts", text)


def check_clock(pair: PairFacts) -> Iterator[Finding]:
    """Yields whether two clocks agree."""
    if not pair.error and abs(pair.clock_s) > MOST_CLOCK_S:
        text = f"the clock of {pair.callee} is {pair.clock_s:+.1f} s off that of {pair.caller}"
        yield Finding(Level.ERROR, "clock", pair.callee, text, "run an NTP client on both hosts")
