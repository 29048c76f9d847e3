"""Decides when a worker looks at its sessions, prompts silent peers and acknowledges data."""

from __future__ import annotations

import math

ACKNOWLEDGE_S = 1.0
"""How often data is acknowledged that is too little to be acknowledged at once."""


class Rounds:
    """The regular rounds over all sessions of one worker.

    Args:
        detection_s: How long a peer may be silent.
        probe_s: How often the kernel probes an idle connection.
    """

    def __init__(self, detection_s: float, probe_s: float) -> None:
        self.interval_s = min(probe_s, detection_s / 5)
        """How long a session may go without a look at it."""
        # Silence for half of ``detection_s`` is suspicious: the kernel's probes may come too late.
        self._prompt_after_s = detection_s / 8 if probe_s > detection_s / 4 else math.inf
        self.acknowledge_at_s = math.inf
        """When to acknowledge next; infinite before the first round."""

    def must_prompt(self, silence_s: float) -> bool:
        """Returns whether to make the system of a silent peer answer."""
        return silence_s >= self._prompt_after_s

    def must_acknowledge(self, now_s: float) -> bool:
        """Returns whether to acknowledge the data of all sessions; if so, the next time is set."""
        is_due = now_s >= self.acknowledge_at_s
        if is_due or math.isinf(self.acknowledge_at_s):
            self.acknowledge_at_s = now_s + ACKNOWLEDGE_S
        return is_due
