"""Checks that all workers have versions that fit; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.observe.doctor.findings import Finding, Level
from torchweft.protocol.observing.facts import HostFacts


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
