"""Makes the Python processes that this one starts install the replacement too.

However a process is started, it gets an environment. A folder put first on ``PYTHONPATH`` holds a
``sitecustomize.py``, which Python runs at startup; see that file.
"""

from __future__ import annotations

import os

from torchweft.errors import ConfigurationError

VARIABLE = "PYTHONPATH"

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
"""Where the ``sitecustomize.py`` is."""

_change: tuple[str | None, str] | None = None
"""The variable's values before and after it was changed here."""


def enable() -> None:
    """Changes the environment, unless this process or its parent has done so already.

    Raises:
        ConfigurationError: The folder's name cannot be in ``PYTHONPATH``.
    """
    global _change
    if os.pathsep in FOLDER:
        raise ConfigurationError(
            f"{FOLDER} cannot be in {VARIABLE}, where {os.pathsep!r} stands between two folders: "
            "use torchweft.compat.install(in_children=False), and call it in every process"
        )
    before = os.environ.get(VARIABLE)
    if FOLDER in _folders(before):
        return
    # An empty entry would mean the current folder.
    after = os.pathsep.join([FOLDER, before]) if before else FOLDER
    os.environ[VARIABLE] = after
    _change = (before, after)


def disable() -> None:
    """Restores the environment; changes that other code has made meanwhile stay."""
    global _change
    now = os.environ.get(VARIABLE)
    if _change is not None and now == _change[1]:
        others = _change[0]
    elif FOLDER in _folders(now):
        others = os.pathsep.join(entry for entry in _folders(now) if entry != FOLDER) or None
    else:
        others = now
    _change = None
    if others is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = others


def _folders(value: str | None) -> list[str]:
    return (value or "").split(os.pathsep)
