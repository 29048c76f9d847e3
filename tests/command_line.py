"""Runs the command ``torchweft`` in this process: an interpreter costs two to three CPU-seconds.

This module belongs to the harness: the tests in ``tests/contract`` know the command only by its
arguments, its status and what it prints.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from torchweft.cli.main import main


def said_by(*arguments: str) -> tuple[int, str, str]:
    """Runs the command; returns its status and what it prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()
