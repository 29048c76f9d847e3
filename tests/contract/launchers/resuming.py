"""Runs the training that resumes from its snapshot, while something of it is killed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.launchers.commands import HERE, started

RESUMED_TRAINING = str(HERE / "resumed_training.py")
PAUSE_S = 0.3
"""Seconds of a step that can be interrupted."""


@dataclass(frozen=True)
class Resumed:
    """A finished training.

    Attributes:
        begun: The first step of each life.
        result: All losses, and the weights, to the last bit.
        err: What the launcher has said.
    """

    begun: list[int]
    result: dict[str, Any]
    err: str


def trained(
    command: Sequence[str],
    directory: Path,
    more: Mapping[str, str] | None = None,
    *,
    killed_at: int | None = None,
    kill: Callable[[], object] = lambda: None,
    look: Callable[[str], object] = lambda line: None,
) -> Resumed:
    """Trains to the end.

    Args:
        command: The launcher, without the program.
        directory: Where snapshots and the result are.
        more: Variables of the launcher.
        killed_at: The step after which ``kill`` is called, once.
        kill: Kills a part.
        look: Is given each line that the launcher says.
    """
    pause_s = 0.0 if killed_at is None else PAUSE_S
    program = [RESUMED_TRAINING, str(directory / "snapshots"), str(directory / "result")]
    begun: list[int] = []
    said: list[str] = []
    with started([*command, *program, str(pause_s)], more, directory) as process:
        assert process.stdout is not None
        assert process.stderr is not None

        def read(lines: Any) -> None:
            for line in lines:
                print(line, end="")  # For a test that fails.
                said.append(line)
                look(line)

        reader = threading.Thread(target=read, args=(process.stderr,))
        reader.start()
        for line in process.stdout:
            print(line, end="")
            assert line.startswith("["), line  # Nothing but what workers write.
            begun += map(int, re.findall(r"life \d+ begins with step (\d+)", line))
            if killed_at is not None and re.search(rf"step {killed_at}$", line):
                killed_at = None
                kill()
        reader.join()
        process.wait()
    assert process.returncode == 0, "".join(said)
    return Resumed(begun, json.loads((directory / "result").read_text()), "".join(said))
