"""Functions that read internals; ``tuning_functions.py`` in the contract has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract.processes.tuning_functions import _asked
from torchweft.embedding.server import Host


def count_pulls() -> None:
    """Has this worker count the messages and the rows of words of each trainer's pulls."""
    pull = Host.pull

    def counted(self: Host, trainer: int, step: int, requests: Sequence[Any]) -> Any:
        _asked[trainer, "messages"] += 1
        for stack, rows, *_ in requests:
            if self.layout.stacks[stack].members[0].config.name == "words":
                _asked[trainer, "rows"] += len(rows)
        return pull(self, trainer, step, requests)

    Host.pull = counted  # type: ignore[method-assign]
