"""Finds groups as observers do, for the tests of observing."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from torchweft.cli.main import main
from torchweft.launch import Cluster
from torchweft.observe.group import Group, find
from torchweft.observe.session import Access

ANSWER_S = 10.0
OPEN = Access()


def group_of(cluster: Cluster) -> Group:
    """Returns the group of a cluster, as an observer finds it."""
    return find(str(cluster.pids["worker0"]), OPEN)


def said_by(*arguments: str) -> tuple[int, str, str]:
    """Runs the command in this process; returns its status and what it prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()
