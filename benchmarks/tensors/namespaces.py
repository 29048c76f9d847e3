"""Two network namespaces with a virtual cable between them, which vanish with this process.

Each is held by a process that waits for the end of its input. However this process ends, its end
of the pipe is closed, the holder ends, and the kernel removes the namespace and the cable.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

INTERFACE = "weft0"
# Reserved for documentation (RFC 5737): no network has them, and they stay in the namespaces.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
TOOLS = ("unshare", "nsenter", "ip")
COMMAND_TIMEOUT_S = 10.0


class NotPermitted(RuntimeError):
    """Network namespaces cannot be made here; the message says why."""


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[list[str]]]:
    """Makes two namespaces; yields for each the prefix that runs a command inside it.

    Raises:
        NotPermitted: The required rights or tools are missing.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NotPermitted(f"there is no command {', '.join(missing)}")
    with contextlib.ExitStack() as ends:
        pids = [ends.enter_context(_held_namespace()) for _ in ADDRESSES]
        inside = [["nsenter", f"--net=/proc/{pid}/ns/net", "--"] for pid in pids]
        first, second = (["name", INTERFACE, "netns", str(pid)] for pid in pids)
        _run(["ip", "link", "add", *first, "type", "veth", "peer", *second])
        for prefix, address in zip(inside, ADDRESSES, strict=True):
            _run([*prefix, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
            for interface in (INTERFACE, "lo"):
                _run([*prefix, "ip", "link", "set", interface, "up"])
        yield inside


@contextlib.contextmanager
def _held_namespace() -> Iterator[int]:
    """Yields the process that holds a new namespace; it ends with its input."""
    with subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the parent only
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            # Its echo shows that it is inside the namespace.
            holder.stdin.write("\n")
            holder.stdin.flush()
            is_inside = bool(holder.stdout.readline())
        except BrokenPipeError:
            is_inside = False
        if not is_inside:
            raise NotPermitted(holder.stderr.read().strip())
        yield holder.pid


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")
