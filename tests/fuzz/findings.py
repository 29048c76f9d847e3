"""Findings: inputs for which a target raised an error that it must not raise."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

Signature = tuple[tuple[str, int], ...]
"""The files and lines of an error's traceback."""


def signature_of(error: BaseException) -> Signature:
    """Returns the places in an error's traceback, the innermost line last."""
    return tuple(_lines(error.__traceback__))


def _lines(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


class Finding(NamedTuple):
    """One input, and its error."""

    target: str
    data: bytes
    text: str

    @property
    def regression(self) -> str:
        """A line for ``tests/tools/fuzz/test_regressions.py``."""
        return f'    ("{self.target}", bytes.fromhex("{self.data.hex()}")),'

    def write(self, folder: Path) -> Path:
        """Writes the input and its error into ``folder``; returns the input's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        path.with_suffix(".txt").write_text(f"{self.regression}\n\n{self.text}\n")
        return path


class Findings:
    """The findings of one run on one target, each place in the code once.

    Args:
        target: Name of the target.
        folder: Where to write them.
    """

    def __init__(self, target: str, folder: Path | None) -> None:
        self.all: list[Finding] = []
        self._target = target
        self._folder = folder
        self._places: set[tuple[str, Signature]] = set()

    def add(self, data: bytes, error: BaseException) -> None:
        """Records that ``data`` made the target raise ``error``."""
        place = type(error).__name__, signature_of(error)[-1:]
        if place in self._places:
            return
        self._places.add(place)
        finding = Finding(self._target, data, "".join(traceback.format_exception(error)))
        self.all.append(finding)
        if self._folder is not None:
            path = finding.write(self._folder)
            print(f"{self._target}: {type(error).__name__}: {error}; see {path}.txt", flush=True)
