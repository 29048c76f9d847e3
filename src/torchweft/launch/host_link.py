"""The standard input, output and error of the agent on another host, whatever carries them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterator
from typing import Protocol

from torchweft.launch.framing import READ_BYTES, SILENCE_S, write_all


class Link(Protocol):
    """Carries bytes to and from one agent.

    One thread calls ``receive``, one ``said``, and any ``send``; they all end with the agent.
    """

    @property
    def address(self) -> str:
        """The address of the host, if it is known only once the agent runs; otherwise empty."""

    def send(self, data: bytes) -> None:
        """Writes to the agent; raises OSError or ValueError if the agent is gone."""

    def receive(self) -> bytes:
        """Blocks until the agent has written; returns nothing at the end."""

    def said(self) -> Iterator[bytes]:
        """Blocks for each next line of the agent's standard error."""

    def why_silent(self) -> str:
        """Returns why the agent has not answered yet; empty if that is unknown."""

    def why_ended(self) -> str:
        """Returns how the link failed, after ``receive`` has returned nothing; empty if not."""

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""

    def end(self, *, is_open: bool, limit_s: float) -> None:
        """Waits for the end of the agent, and ends the link by force after ``limit_s``.

        Args:
            is_open: Whether the agent has answered; otherwise there is no need to wait.
            limit_s: Seconds to wait.
        """

    def close(self) -> None:
        """Releases what the link holds, after its threads have ended."""


class CommandLink:
    """A command of this host, such as ``ssh``, that connects with the agent.

    A command may not notice that the other machine is gone: ``srun`` waits until SLURM says so. The
    agent writes now and then, so its silence is the end.

    Args:
        command: The command and its arguments.
        silence_s: Seconds without a byte after which an agent that has written before is lost.

    Raises:
        FileNotFoundError: There is no such command here.
    """

    address = ""

    def __init__(self, command: tuple[str, ...], silence_s: float = SILENCE_S) -> None:
        self._name, self._silence_s = command[0], silence_s
        self._has_spoken = self._is_silent = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._stderr = self._process.stderr
        os.set_blocking(self._stdin.fileno(), True)

    def send(self, data: bytes) -> None:
        """Writes to the agent; raises OSError or ValueError if the agent is gone."""
        write_all(self._stdin.fileno(), data)

    def receive(self) -> bytes:
        """Blocks until the agent has written; returns nothing at the end, or after a silence."""
        # The launcher limits the first wait.
        limit_s = self._silence_s if self._has_spoken else None
        if not select.select([self._stdout], [], [], limit_s)[0]:
            self._is_silent = True
            self._process.kill()
            return b""
        self._has_spoken = True
        return os.read(self._stdout.fileno(), READ_BYTES)

    def said(self) -> Iterator[bytes]:
        """Blocks for each next line of the command's standard error."""
        return iter(self._stderr)

    def why_silent(self) -> str:
        """Returns nothing: the command explains itself when it ends."""
        return ""

    def why_ended(self) -> str:
        """Returns the command's exit code; waits for a moment, as the command ends at once."""
        if self._is_silent:
            return f"nothing was heard of it for {self._silence_s:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        return f"{self._name} ended with exit code {code}" if code else ""

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def end(self, *, is_open: bool, limit_s: float) -> None:
        """Waits for the end of the command, and kills it after ``limit_s``."""
        if not is_open:
            self._process.terminate()  # it may still try to connect
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Closes the pipes."""
        self._stdout.close()
        self._stderr.close()
