"""One mistake: a program, its start commands, and the line by which its message is recognized."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

MARK = "# <-"
"""The mark at the end of each line of a program that belongs to the mistake."""

PROGRAM = "python program.py"


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        title: The mistake, in a few words.
        source: The program.
        message: Regular expression that finds the first line of the message.
        starts: Commands, started together; ``PORT`` stands for a free port.
        is_quick: Whether it needs no other process, and is run with every test run.
        shown: What the page shows as the mistake; by default the marked lines.
    """

    title: str
    source: str
    message: str
    starts: tuple[str, ...] = (PROGRAM,)
    is_quick: bool = False
    shown: str = ""

    @property
    def program(self) -> str:
        """The program as it is run, which prints ``TELLS`` when the mistake is made."""
        lines: list[str] = []
        is_told = False
        for line in textwrap.dedent(self.source).strip().splitlines():
            if line.endswith(MARK) and not is_told:
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(f'{indent}print("{TELLS}", flush=True)')
                is_told = True
            lines.append(line.removesuffix(MARK).rstrip())
        return "\n".join(lines) + "\n"

    @property
    def code(self) -> str:
        """What the page shows as the mistake."""
        if self.shown:
            return self.shown
        lines = [line for line in self.source.splitlines() if line.endswith(MARK)]
        return "\n".join(line.removesuffix(MARK).strip() for line in lines)


TELLS = "@@ the mistake is made now"
"""The line that a program prints right before the mistake."""


def in_cluster(body: str, before: str = "", workers: int = 2) -> str:
    """Returns a program whose ``body`` runs with some workers."""
    return (
        "import torch\nimport torchweft as weft\nfrom torchweft import autograd, rpc\n\n"
        f"{textwrap.dedent(before).strip()}\n\n\n"
        f"def main():\n    with weft.cluster(workers={workers}):\n"
        f"{textwrap.indent(textwrap.dedent(body).strip(), ' ' * 8)}\n\n\n"
        'if __name__ == "__main__":\n    main()\n'
    )


def alone(body: str, before: str = "") -> str:
    """Returns a program whose ``body`` runs in a group of one worker."""
    return (
        "import torch\nimport torchweft as weft\nfrom torchweft import autograd, rpc\n\n"
        f"{textwrap.dedent(before).strip()}\n\n"
        'rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options='
        'rpc.RpcBackendOptions(init_method="tcp://127.0.0.1:0"))\n'
        f"{textwrap.dedent(body).strip()}\n"
        "rpc.shutdown()\n"
    )
