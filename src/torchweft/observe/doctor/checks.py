"""The checks: from facts of workers to findings; pure. ``channels`` has those of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.errors import ConfigurationError
from torchweft.hybrid import Facts, choose_backend
from torchweft.observe.doctor.channels import check_pair
from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import HostFacts, PairFacts

LEAST_DESCRIPTORS = 1024
LEAST_SHM_BYTES = 1 << 30
MOST_CLOCK_S = 1.0
_MEBIBYTE = 1 << 20


def diagnose(facts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yields the findings of all checks; pure."""
    if facts:
        yield from check_versions(facts)
        yield from check_mtu(facts)
        yield from check_backend(facts)
    for each in facts:
        yield from check_descriptors(each, len(facts))
    for each in {each.host: each for each in facts}.values():
        yield from check_shm(each)
        yield from check_ptrace(each)
        yield from check_names(each)
    yield from check_clocks(pairs)
    for pair in pairs:
        yield from check_clock(pair)
        yield from check_pair(pair)


def check_versions(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yields a finding for each of Weft, PyTorch and Python."""
    for name, label in (("weft", "Weft"), ("torch", "torch"), ("python", "Python")):
        versions: dict[str, list[str]] = {}
        for each in facts:
            versions.setdefault(_compared(name, getattr(each, name)), []).append(each.worker)
        if len(versions) == 1:
            text = f"{label} {getattr(facts[0], name)}"
            yield Finding(Level.GOOD, "versions", "all workers", text)
            continue
        told = "; ".join(f"{each} on {', '.join(on)}" for each, on in versions.items())
        fix = f"install the same {label} everywhere"
        yield Finding(Level.ERROR, "versions", "workers", f"different {label}: {told}", fix)


def _compared(name: str, version: str) -> str:
    """Returns the part of a version that must be equal: of Python and torch, without the patch."""
    return version if name == "weft" else ".".join(version.split(".")[:2])


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
        facts.backends,
        facts.has_infiniband,
        facts.has_ip_over_infiniband,
    )


def check_descriptors(facts: HostFacts, workers: int) -> Iterator[Finding]:
    """Yields whether a worker may open enough files: several for each other worker."""
    needed = max(LEAST_DESCRIPTORS, 64 + 8 * workers)
    if facts.descriptors < 0 or facts.descriptors >= needed:
        return
    text = f"may have {facts.descriptors} descriptors open, and needs {needed}"
    yield Finding(Level.ERROR, "descriptors", facts.worker, text, f"ulimit -n {needed}")


def check_shm(facts: HostFacts) -> Iterator[Finding]:
    """Yields whether ``/dev/shm`` is large enough for those that use it."""
    if facts.shm_bytes >= LEAST_SHM_BYTES:
        return
    text = (
        f"/dev/shm has {facts.shm_bytes // _MEBIBYTE} MiB: data loaders and torch.multiprocessing "
        "keep tensors there (Weft does not)"
    )
    fix = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    yield Finding(Level.ERROR, "/dev/shm", facts.host, text, fix)


def check_ptrace(facts: HostFacts) -> Iterator[Finding]:
    """Yields whether workers may read one another's memory."""
    if facts.ptrace_scope <= 0:
        return
    text = (
        f"ptrace_scope is {facts.ptrace_scope}: workers that are not parent and child may not read "
        "one another's memory, so tensors that find no room in shared memory go through sockets"
    )
    fix = "sysctl kernel.yama.ptrace_scope=0"
    yield Finding(Level.NOTE, "ptrace", facts.host, text, fix)


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
