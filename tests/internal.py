"""Constants of Weft that a test or a benchmark changes in the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping

from torchweft.knobs import INTERNAL_VARIABLE


def overridden(
    environment: Mapping[str, str] | None = None, /, **constants: float
) -> dict[str, str]:
    """Returns an environment with constants of ``torchweft.knobs``, as ``SPIN_S=0``.

    Args:
        environment: Other variables. Constants that it already sets keep their values.
        constants: The values, by name.
    """
    settings = [f"{name}={value}" for name, value in constants.items()]
    before = dict(environment or {})
    if INTERNAL_VARIABLE in before:
        settings.append(before[INTERNAL_VARIABLE])
    return {**before, INTERNAL_VARIABLE: ",".join(settings)}
