"""Findings of a check, and the text of all of them."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class Level(enum.Enum):
    """How bad a finding is: only errors make the diagnosis fail."""

    GOOD = "ok"
    NOTE = "note"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        level: How bad it is.
        check: Name of the check.
        where: The host, the worker or the pair of workers.
        text: What was found.
        fix: What changes it; empty if nothing is to be done.
    """

    level: Level
    check: str
    where: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        findings: In the order of the checks.
    """

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether there is no error."""
        return all(each.level is not Level.ERROR for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Returns the findings for ``json.dumps``."""
        lines = [{**asdict(each), "level": each.level.value} for each in self.findings]
        return {"is_well": self.is_well, "findings": lines}

    def __str__(self) -> str:
        """Returns a line for each finding, and one for each fix."""
        lines = []
        for each in self.findings:
            lines.append(f"{each.level.value:5}  {each.check:12}  {each.where}: {each.text}")
            if each.fix:
                lines.append(f"{'':21}-> {each.fix}")
        errors = sum(each.level is Level.ERROR for each in self.findings)
        notes = sum(each.level is Level.NOTE for each in self.findings)
        lines.append("all is well" if self.is_well else _counted(errors, "error"))
        if notes:
            lines[-1] += f", {_counted(notes, 'note')}"
        return "\n".join(lines)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count > 1 else ''}"
