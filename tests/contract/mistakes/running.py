"""Runs mistakes as a person does, and finds the message that this person sees."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.contract.mistakes.mistake import TELLS, Mistake

LIMIT_S = 60.0
_FURTHER_LINES = 12
_ENDS = ("Traceback", "The above exception", "During handling", "[")


class Outcome(NamedTuple):
    """The outcome of a mistake.

    Attributes:
        message: The message, as it is printed.
        seconds: From the mistake to the message; from the start, where it is made there.
    """

    message: str
    seconds: float


class Line(NamedTuple):
    """A line that a process has printed, and the time at which it did."""

    printed_s: float
    text: str


def run(mistake: Mistake) -> Outcome:
    """Runs a mistake in processes of its own, and returns its outcome."""
    with tempfile.TemporaryDirectory(prefix="mistake-") as directory:
        (Path(directory) / "program.py").write_text(mistake.program)
        port = str(_free_port())
        began_s = time.monotonic()
        running = [
            _Running(re.sub(r"\bPORT\b", port, start), directory) for start in mistake.starts
        ]
        end_s = began_s + LIMIT_S
        try:
            for process in running:
                process.wait(end_s - time.monotonic())
        finally:
            for process in running:
                process.close()
        lines = sorted(line for process in running for line in process.lines)
        return find(mistake, lines, began_s, directory)


def find(mistake: Mistake, lines: Sequence[Line], began_s: float, directory: str) -> Outcome:
    """Returns the message of a mistake among the lines that were printed."""
    texts = [line.text for line in lines]
    places = [place for place, text in enumerate(texts) if re.search(mistake.message, text)]
    own = [place for place in places if not texts[place].startswith("[")] or places
    if not own:
        raise AssertionError("\n".join([f"{mistake.title}: no {mistake.message!r} in", *texts]))
    place = own[-1]
    shown = [texts[place]]
    for text in texts[place + 1 : place + _FURTHER_LINES]:
        if not text.strip() or text.startswith((*_ENDS, TELLS)):
            break
        shown.append(text)
    told = [line.printed_s for line in lines[:place] if line.text == TELLS]
    since_s = told[0] if told else began_s
    return Outcome(tidy("\n".join(shown), directory), lines[place].printed_s - since_s)


def tidy(text: str, directory: str) -> str:
    """Returns a message without the parts that are specific to this run."""
    text = text.replace(f"{os.path.realpath(directory)}/", "").replace(f"{directory}/", "")
    return re.sub(r"\n +[~^]+(?=\n|$)", "", text)


def alike(text: str) -> str:
    """Returns the text that two messages of one mistake share: all but the numbers."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", text).split())


def environment(**variables: str) -> dict[str, str]:
    """Returns an environment without variables that other runs have left in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEFT_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **variables}


class _Running:
    """One process, whose lines are recorded as they come."""

    def __init__(self, start: str, directory: str) -> None:
        words = shlex.split(start)
        count = next(place for place, word in enumerate(words) if "=" not in word)
        variables = dict(word.split("=", 1) for word in words[:count])
        python, *arguments = words[count:]
        assert python == "python"
        self.lines: list[Line] = []
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(Line(time.monotonic(), line.rstrip("\n")))

    def wait(self, limit_s: float) -> None:
        """Waits until the process has ended, at most ``limit_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(limit_s, 0))

    def close(self) -> None:
        """Ends the process, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
