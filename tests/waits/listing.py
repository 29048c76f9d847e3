"""Reads the list of waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LIST = Path(__file__).with_name("list.txt")


@dataclass
class Section:
    """Waits that end in the same way.

    Attributes:
        title: What the waits are for.
        ends: What ends them at the latest.
        told: What the program is told then.
        places: The functions, as ``module:function``.
    """

    title: str
    ends: str = ""
    told: str = ""
    places: list[str] = field(default_factory=list)


def read() -> list[Section]:
    """Returns the sections of the list."""
    sections: list[Section] = []
    for number, line in enumerate(LIST.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            sections.append(Section(line.removeprefix("== ")))
        elif line.startswith("ends: "):
            sections[-1].ends = line.removeprefix("ends: ")
        elif line.startswith("told: "):
            sections[-1].told = line.removeprefix("told: ")
        else:
            place = line.partition(" | ")[0]
            assert ":" in place, f"line {number} of {LIST.name} names no function: {line}"
            sections[-1].places.append(place)
    return sections
